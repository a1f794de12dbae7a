"""Fine-tuning: tasks, their data, and the Hugging Face host."""
