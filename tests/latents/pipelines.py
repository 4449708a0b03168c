"""The lines of the installed diffusers pipelines that lead from a returned latent to ``vae.decode``, run as they are.

The pipelines import transformers, which is no dependency; so the statements are taken out of the source file. What
they hand to ``vae.decode`` is the reference of the parity tests.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch

_FOLDER = Path(diffusers.__file__).parent / "pipelines"


def static_method(file: str, name: str) -> Callable[..., torch.Tensor]:
    """A static method of a pipeline, compiled from its file."""
    tree = ast.parse((_FOLDER / file).read_text(encoding="utf-8"))
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list = []
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    space: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body=[function], type_ignores=[]), file, "exec"), space)
    return space[name]  # type: ignore[no-any-return]


class _DecodeReachedError(Exception):
    pass


def decode_input(
    file: str, vae: Any, latents: torch.Tensor, methods: tuple[str, ...] = (), **names: Any
) -> torch.Tensor:
    """What the pipeline of ``file`` gives to ``vae.decode`` for the ``latents`` that it would have returned.

    Args:
        file: of the pipeline, relative to diffusers' ``pipelines``.
        vae: a real model; its ``decode`` is not reached.
        methods: static methods that the lines use.
        names: local variables that the lines use.
    """
    seen: list[torch.Tensor] = []

    def decode(z: torch.Tensor, *_: Any, **__: Any) -> None:
        seen.append(z)
        raise _DecodeReachedError

    vae.decode = decode
    pipeline = SimpleNamespace(vae=vae, vae_scale_factor=8, upcast_vae=lambda: vae.to(torch.float32))
    for name in methods:
        setattr(pipeline, name, static_method(file, name))
    space = {
        "self": pipeline,
        "torch": torch,
        "latents": latents,
        "output_type": "pt",
        "get_module_execution_device": lambda module: next(module.parameters()).device,
        "generator": None,
        **names,
    }
    try:
        exec(compile(ast.Module(body=_decode_branch(file), type_ignores=[]), file, "exec"), space)
    except _DecodeReachedError:
        return seen[0]
    finally:
        del vae.decode
    raise AssertionError(f"{file}: the lines do not reach vae.decode")


def _decode_branch(file: str) -> list[ast.stmt]:
    """The branch of ``if [not] output_type == "latent"`` in ``__call__`` that decodes."""
    tree = ast.parse((_FOLDER / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "output_type == 'latent'" in ast.unparse(node.test):
            for branch in (node.body, node.orelse):
                if any("vae.decode(" in ast.unparse(statement) for statement in branch):
                    return branch
    raise AssertionError(f"{file}: no branch that decodes")
