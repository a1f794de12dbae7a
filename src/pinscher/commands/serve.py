"""`pinscher serve`: stored models over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from pinscher.commands.console import say, shown, text
from pinscher.commands.flags import WHOLE, number
from pinscher.errors import InputError
from pinscher.settings import Number

PORT, WORKERS, THREADS = Number(0, 65535), Number(1, 256), Number(0, 1024)
TEXTS, MEGABYTES = Number(1, 1e6), Number(1, 4096)
PATIENCE = 30  # seconds that requests under way have at the end


def command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Stored models, each as FOLDER or NAME=FOLDER.", metavar="[NAME=]FOLDER…", show_default=False
        ),
    ],
    host: Annotated[str, shown("Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[str, shown("Port to listen at; 0 for any that is free.", WHOLE)] = "8080",
    workers: Annotated[str, shown("Processes, each with the models in memory.", WHOLE)] = "1",
    threads: Annotated[str, shown("Threads of each process; 0 shares the CPUs among them.", WHOLE)] = "0",
    mode: Annotated[str, shown("Weights and activations: auto, int8, w8a8 or fp32.")] = "auto",
    queue: Annotated[str, shown("Texts that may wait; further ones are answered with 429.", WHOLE)] = "2048",
    max_texts: Annotated[str, shown("Texts of a request.", WHOLE)] = "1024",
    max_megabytes: Annotated[str, shown("Size of a request.", WHOLE)] = "16",
    api_key: Annotated[str | None, text("Key that clients must give; also PINSCHER_API_KEY.")] = None,
) -> None:
    """Serve stored models over HTTP, in the shapes of OpenAI and text-embeddings-inference."""
    count = int(number(WORKERS, workers, "--workers"))
    told = int(number(THREADS, threads, "--threads"))
    at = int(number(PORT, port, "--port"))
    limits: dict[str, Any] = {
        "queue": int(number(TEXTS, queue, "--queue")),
        "most_texts": int(number(TEXTS, max_texts, "--max-texts")),
        "most_bytes": int(number(MEGABYTES, max_megabytes, "--max-megabytes")) << 20,
    }
    import uvicorn

    from pinscher.runtime import cpus
    from pinscher.serve import app

    settings = app.Settings(
        named(models),
        mode,
        told or max(1, cpus.sustained() // count),
        api_key=api_key or os.environ.get("PINSCHER_API_KEY") or None,
        **limits,
    )
    if count == 1:
        application: Any = app.make(settings)
    else:
        app.Server(settings).batcher.close()  # what is wrong is said once, and here
        os.environ[app.ENVIRONMENT] = app.as_environment(settings)
        application = "pinscher.serve.app:from_environment"
    for name, folder in settings.models.items():
        say(f"{name}: {folder}")
    uvicorn.run(
        application,
        factory=count > 1,
        host=host,
        port=at,
        workers=count,
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=PATIENCE,
        server_header=False,
    )


def named(models: list[str]) -> dict[str, str]:
    """Folders by name; without one, a folder has its own, or that of the run that it is in.

    Raises:
        InputError: if two have the same name.
    """
    found: dict[str, str] = {}
    for one in models:
        name, equals, folder = one.partition("=")
        if not equals or not name or os.path.exists(one):
            path = Path(one).absolute()
            name, folder = path.parent.name if path.name in ("export", "model") else path.name, one
        if name in found:
            raise InputError(f"two models are called {name}: give names, as in first={found[name]} second={folder}.")
        found[name] = folder
    return found
