"""All tasks by name: those of the paper, and kinds of tasks for the user's own data."""

from pinscher.train.tasks import data_to_text, embeddings, glue, ner, reranking, reviews, squad  # noqa: F401  (each adds its own)
from pinscher.train.tasks.task import TASKS, Outputs, Task

__all__ = ["TASKS", "Outputs", "Task"]
