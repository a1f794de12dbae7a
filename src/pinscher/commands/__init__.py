"""The command: one file for each subcommand. Only this room joins others."""
