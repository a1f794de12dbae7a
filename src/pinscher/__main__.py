"""`python -m pinscher`, and so `accelerate launch -m pinscher` and `torchrun -m pinscher`."""

from pinscher.commands.app import main

main()
