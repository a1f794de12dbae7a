"""Stored models over HTTP, in the shapes of OpenAI and text-embeddings-inference."""
