"""The two formats of an exported policy: a PyTorch program, and ONNX. Each is made in memory, and
compared with the policy before it is written.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tianflow import plugins
from tianflow.export import ExportError
from tianflow.export.deployed import Deployed

METADATA = "tianflow.json"
"""Name of the metadata inside a .pt2 file; in ONNX they are the property ``tianflow``."""
Run = Callable[[Mapping[str, Any]], list[Tensor]]
"""Runs the exported program: arguments of `Deployed.forward` in, its outputs out, in the order of
`flat`.
"""


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Inputs or outputs of `Deployed.forward` by path: {"observation", "state/h",
    "action", ...}.
    """
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        name = f"{prefix}/{key}" if prefix else key
        found |= flat(value, name) if isinstance(value, Mapping) else {name: value}
    return found


def to_pt2(deployed: Deployed, metadata: Mapping[str, Any]) -> bytes:
    """The bytes of a file for `torch.export.load`.

    Raises:
        ExportError: the policy cannot be traced, or the trace computes something else.
    """
    program = _traced(deployed)
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(
            program, buffer, extra_files={METADATA: json.dumps(_complete(metadata, deployed))}
        )
        loaded = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    _require_alike(deployed, lambda inputs: list(flat(loaded(**inputs)).values()))
    return buffer.getvalue()


def to_onnx(deployed: Deployed, metadata: Mapping[str, Any]) -> bytes:
    """The bytes of an ONNX model. Inputs and outputs have the names of `flat`; the new state is
    ``next_state/...``.

    Raises:
        ExportError: as `to_pt2`, or the extra ``onnx`` is not installed.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - PyTorch writes ONNX with it
    except ImportError as error:
        raise ExportError(
            f"ONNX needs an extra: {plugins.install_line('onnx')} first ({error})",
            bad=True,
        ) from None
    complete = _complete(metadata, deployed, after="next_")
    inputs, outputs, program = (
        list(complete["inputs"]),
        list(complete["outputs"]),
        _traced(deployed),
    )
    with _quiet(), _as_export_errors("written as ONNX"):
        written: Any = torch.onnx.export(
            program,
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
            optimize=True,
        )
        model = written.model_proto
    onnx.helper.set_model_props(model, {"tianflow": json.dumps(complete)})
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    data: bytes = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def run(given: Mapping[str, Any]) -> list[Tensor]:
        named = {name: value.numpy() for name, value in flat(given).items()}
        return [torch.from_numpy(np.asarray(value)) for value in session.run(outputs, named)]

    _require_alike(deployed, run)
    return data


def _complete(
    metadata: Mapping[str, Any], deployed: Deployed, *, after: str = ""
) -> dict[str, Any]:
    """``metadata`` with dtype and shape of all inputs and outputs. ``after`` is the prefix of new
    state.
    """

    def described(tree: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            name: {"dtype": str(x.dtype).removeprefix("torch."), "shape": ["batch", *x.shape[1:]]}
            for name, x in tree.items()
        }

    example = _example(deployed, 2)
    outputs = {
        f"{after}{name}" if name.startswith("state/") else name: x
        for name, x in flat(deployed(**example)).items()
    }
    return {**metadata, "inputs": described(flat(example)), "outputs": described(outputs)}


def _traced(deployed: Deployed) -> torch.export.ExportedProgram:
    """`deployed` as a program for any batch size, with its own copy of the weights."""
    batch = torch.export.Dim("batch")

    def shapes(tree: Any) -> Any:
        return (
            {name: shapes(leaf) for name, leaf in tree.items()}
            if isinstance(tree, Mapping)
            else {0: batch}
        )

    example = _example(deployed, 2)
    with _quiet(), _as_export_errors("traced"):
        program = torch.export.export(
            deployed, (), example, dynamic_shapes=shapes(example), strict=False
        )
    program.example_inputs = None  # they would be written as a pickle
    for node in program.graph.nodes:  # they hold file names of this machine
        node.meta.pop("stack_trace", None)
    # Weights are views of one buffer, and each view would be written with the whole buffer.
    program.constants.update(
        {
            name: value.detach().clone()
            for name, value in program.constants.items()
            if isinstance(value, Tensor)
        }
    )
    return program


def _example(deployed: Deployed, batch: int) -> dict[str, Any]:
    return deployed.inputs(batch, np.random.default_rng(batch))


def _require_alike(deployed: Deployed, run: Run) -> None:
    """Compare the program with the policy for two batch sizes: a network whose code depends on the
    batch size may be traced for one size only.
    """
    for batch in (1, 3):
        inputs = _example(deployed, batch)
        with _as_export_errors(f"run on a batch of {batch}"):
            found, expected = run(inputs), flat(deployed(**inputs))
        for (name, reference), value in zip(expected.items(), found, strict=True):
            # rounding may decide between two equal actions, so discrete actions are not compared
            alike = reference.shape == value.shape and reference.dtype == value.dtype
            if alike and reference.is_floating_point():
                alike = bool(
                    (reference - value).abs().max() <= 1e-4 + 1e-3 * reference.abs().max()
                )  # large numbers may cancel to small ones
            if not alike:
                raise ExportError(
                    f"the exported program and the policy differ in {name}, for a batch of {batch}"
                )


@contextlib.contextmanager
def _as_export_errors(doing: str) -> Iterator[None]:
    """Convert errors: networks may be plug-ins, and the errors of PyTorch have no common base."""
    try:
        yield
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ExportError(
            f"the policy cannot be {doing}: {type(error).__name__}: {first}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs of PyTorch about its own internals."""
    loggers = [
        logging.getLogger(name) for name in ("torch.export", "torch.onnx", "onnxscript", "onnx_ir")
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
