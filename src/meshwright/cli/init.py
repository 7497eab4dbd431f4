"""``meshwright init``: a commented run file for a model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.cli.options import Json, Model
from meshwright.cli.output import show_json, write_new_text

_HUB_TIMEOUT_S = 10.0


def init(
    model: Model,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="The run file to write; - prints it.")
    ] = "run.yaml",
    as_json: Json = False,
) -> None:
    """Write a commented run file for MODEL; a Hub id (owner/name) is taken where there is a network.

    Example: meshwright init recipes/models/tiny-llama --out run.yaml
    """
    from meshwright.config.template import run_file_text
    from meshwright.model.catalogue import find
    from meshwright.model.read_hf import read_model

    beside = Path(out).parent if out != "-" else Path()
    target = model
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists() and find(model) is None
    if out != "-" and Path(out).exists():
        raise MeshwrightError(
            problem(
                "E867", where=f"--out {out}", found="exists already", do="name another file, or remove it"
            )
        )
    config = fetch_config(model) if hub_id else ""
    if hub_id:
        folder = beside / model.rsplit("/", 1)[1]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found = error.strerror or str(error)
            raise MeshwrightError(problem("E867", where=str(folder), found=found)) from error
        write_new_text(folder / "config.json", config)
        target = str(folder)
    spec = read_model(target)
    text = run_file_text(spec, target)
    if out == "-":
        print(text, end="")
        return
    path = write_new_text(out, text, replace=False)
    if as_json:
        show_json({"run_file": str(path), "model": target, "num_parameters": spec.num_parameters})
    else:
        print(f"written to {path}; next: meshwright train {shlex.quote(str(path))} --dry-run")


def _reach(endpoint: str) -> None:
    """Raise OSError at once where there is no network, which the Hub's client would try again for half a minute."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    if getproxies():
        return  # a proxy may reach what this machine cannot
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    socket.create_connection((parts.hostname or "", port), timeout=_HUB_TIMEOUT_S).close()


def fetch_config(hub_id: str) -> str:
    """Return the text of a Hub model's config.json.

    Raises:
        MeshwrightError: E868 when the Hub cannot be reached or has no such model for this user.
    """
    try:
        from huggingface_hub import constants, hf_hub_download, logging
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        found = "huggingface_hub is not installed"
        raise MeshwrightError(problem("E868", where=hub_id, found=found), ExitCode.ENVIRONMENT) from None
    logging.set_verbosity_error()
    try:
        _reach(constants.ENDPOINT)
        file = hf_hub_download(hub_id, "config.json", etag_timeout=_HUB_TIMEOUT_S)
        return Path(file).read_text(encoding="utf-8")
    except GatedRepoError:
        found = "the model is gated: accept its terms on its page and log in"
        raise MeshwrightError(problem("E868", where=hub_id, found=found)) from None
    except RepositoryNotFoundError:
        found = "the Hub has no such model (or it is private)"
        raise MeshwrightError(problem("E868", where=hub_id, found=found)) from None
    except Exception as error:  # the Hub's client raises many kinds when there is no network
        first = str(error).strip().splitlines()[:1]
        found = f"the Hub could not be reached ({type(error).__name__}: {''.join(first)[:200]})"
        raise MeshwrightError(problem("E868", where=hub_id, found=found), ExitCode.ENVIRONMENT) from error
