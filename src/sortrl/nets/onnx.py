"""A policy as an ONNX file: raw observation in; action, scores and certificate out; standard operators only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sortrl.core.errors import MissingDependency
from sortrl.core.files import atomic_path
from sortrl.nets.float_bounds import LARGEST_ERROR, LARGEST_NUMBER, RADIUS_DOWN, SMALLEST_RADIUS, ErrorBound, FrontPart
from sortrl.nets.front import AveragePool, BoundedConv, Centre, Crop, Pixels, Ramp
from sortrl.nets.layers import SortConv, SortLinear
from sortrl.nets.sort import SortEvaluation, SortPolicy

OPSET = 18  # the first in which reductions take their axes as an input; every current runtime has it
IR_VERSION = 9


def export_onnx(policy: SortPolicy, path: str | Path) -> None:
    """Write the evaluation network of ``policy``, normalisation and certificate included, as an ONNX file.

    Input ``obs`` (batch, *obs_shape), float32, raw. Outputs, per observation: ``scores`` float32 (batch, n_actions);
    ``action`` and ``runner_up`` int64; ``margin`` between their scores and certified ``radius`` in unit space, float64. The
    radius is that of :meth:`SortPolicy.certify`, computed from what the runtime itself computed, so it is as sound there,
    provided that the runtime evaluates float32 as float32 (no TF32, no float16). An observation with NaN or infinity
    gets radius 0. Behind ramps it is the radius of the margin, which is less than what :meth:`SortPolicy.certify` proves there
    by boxes.

    A sort layer takes batch x out x in numbers of memory: 1.6 MB per state at width 640. Cut large batches.
    """
    onnx = _onnx()
    graph = _Graph(onnx)
    unit = _normalized(graph, policy)
    network = policy.sort_evaluation(thorough=True)
    scores, magnitudes = _network(graph, network, unit)
    _certificate(graph, network.bound, scores, magnitudes)
    kinds = onnx.TensorProto
    outputs = [("scores", kinds.FLOAT, ["batch", policy.n_actions])]
    outputs += [(name, kinds.INT64, ["batch"]) for name in ("action", "runner_up")]
    outputs += [(name, kinds.DOUBLE, ["batch"]) for name in ("margin", "radius")]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "sortrl",
            [onnx.helper.make_tensor_value_info("obs", kinds.FLOAT, ["batch", *policy.obs_shape])],
            [onnx.helper.make_tensor_value_info(*output) for output in outputs],
            graph.initializers,
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="sortrl",
        doc_string="radius: no change of the normalised observation of at most this l_inf size changes the action.",
    )
    _write(onnx, model, path)


def export_scores(policy: SortPolicy, path: str | Path) -> None:
    """Write the sort layers alone, for verifiers: unit-space input ``X`` (1, *obs_shape) -> scores ``Y`` (1, n_actions), float32.

    Where all layers are maxima (``rho`` 0) there is nothing in it but differences, absolute values, maxima and sums.
    """
    onnx = _onnx()
    graph = _Graph(onnx)
    _network(graph, policy.sort_evaluation(thorough=True), "X")
    graph.add("Identity", "scores", name="Y")
    kind = onnx.TensorProto.FLOAT
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.leading_to("Y"),
            "sortrl-scores",
            [onnx.helper.make_tensor_value_info("X", kind, [1, *policy.obs_shape])],
            [onnx.helper.make_tensor_value_info("Y", kind, [1, policy.n_actions])],
            graph.initializers_used,
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="sortrl",
    )
    _write(onnx, model, path)


def _write(onnx: Any, model: Any, path: str | Path) -> None:
    onnx.checker.check_model(model, full_check=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(model.SerializeToString())


class _Graph:
    """Nodes and constants in the making; every method returns the name of what it made."""

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.initializers_used: list[Any] = []

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(self.onnx.numpy_helper.from_array(np.array(value, dtype, order="C"), name))
        return name

    def add(self, operator: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        output = name or f"v{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def leading_to(self, output: str) -> list[Any]:
        """The nodes that ``output`` is computed from, in order; constants that they do not need are left out from then on."""
        wanted, kept = {output}, []
        for node in reversed(self.nodes):
            if wanted & set(node.output):
                wanted |= set(node.input)
                kept.append(node)
        self.initializers_used = [constant for constant in self.initializers if constant.name in wanted]
        return kept[::-1]

    def to_double(self, value: str) -> str:
        return self.add("Cast", value, to=self.onnx.TensorProto.DOUBLE)

    def flat(self, value: str) -> str:
        """(batch, all the rest)."""
        return self.add("Flatten", value, axis=1)

    def largest(self, value: str) -> str:
        """The largest absolute value of each row (batch, 1), float64."""
        axes = self.constant([1], np.int64)
        return self.to_double(self.add("ReduceMax", self.add("Abs", self.flat(value)), axes, keepdims=1))

    def top(self, value: str, count: int) -> tuple[str, str]:
        """The ``count`` largest along the last axis and where they are; of equals, the first comes first."""
        values, indices = f"v{len(self.nodes)}", f"v{len(self.nodes)}i"
        inputs = [value, self.constant([count], np.int64)]
        self.nodes.append(self.onnx.helper.make_node("TopK", inputs, [values, indices], axis=-1, largest=1, sorted=1))
        return values, indices

    def column(self, value: str, index: int, name: str | None = None) -> str:
        """(batch, n) -> (batch,)."""
        return self.add("Gather", value, self.constant(index, np.int64), name=name, axis=1)


def _normalized(graph: _Graph, policy: SortPolicy) -> str:
    """Raw -> unit space, in float64 as the policy does it."""
    normalizer = policy.normalizer
    mean, scale = (graph.constant(part.numpy(), np.float64) for part in (normalizer.mean, normalizer.scale))
    unit = graph.add("Div", graph.add("Sub", graph.to_double("obs"), mean), scale)
    if np.isfinite(normalizer.clip):
        low, high = (graph.constant(sign * normalizer.clip, np.float64) for sign in (-1, 1))
        unit = graph.add("Clip", unit, low, high)
    return graph.add("Cast", unit, to=graph.onnx.TensorProto.FLOAT)


def _network(graph: _Graph, network: SortEvaluation, unit: str) -> tuple[str, list[str]]:
    """Scores, and the largest number of every stage, as in :func:`sortrl.nets.float_bounds.traced_scores`."""
    x, magnitudes = unit, []
    for part in network.front:
        most = graph.add("Mul", graph.largest(x), graph.constant([[part.lipschitz]], np.float64))
        if isinstance(part, (BoundedConv, Centre)):
            most = graph.add("Add", most, graph.constant([[part.offset]], np.float64))
        magnitudes.append(most)
        x = _front(graph, part, x)
    x = graph.flat(x)
    for layer, shift in zip(network.layers, network.shifts, strict=False):
        y = _sort_layer(graph, layer, x)
        x = graph.add("Sub", y, graph.constant(shift.running_mean.numpy(), np.float32))
        magnitudes += [graph.largest(y), graph.largest(x)]
    y = _sort_layer(graph, network.layers[-1], x)
    bias = graph.constant(network.bias.detach().numpy(), np.float32)
    scores = graph.add("Neg", graph.add("Add", y, bias), name="scores")
    return scores, [*magnitudes, graph.largest(y), graph.largest(scores)]


def _front(graph: _Graph, part: FrontPart, x: str) -> str:
    if isinstance(part, Crop):
        last = np.iinfo(np.int64).max
        ends = [-border if border else last for border in (part.bottom, part.right)]
        bounds = [graph.constant(value, np.int64) for value in ([part.top, part.left], ends, [2, 3])]
        return graph.add("Slice", x, *bounds)
    if isinstance(part, AveragePool):
        return graph.add("AveragePool", x, kernel_shape=[part.size] * 2, strides=[part.size] * 2)
    if isinstance(part, Pixels):
        return graph.add("Gather", graph.flat(x), graph.constant(part.indices.numpy(), np.int64), axis=1)
    if isinstance(part, Centre):
        return graph.add("Sub", x, graph.constant(part.centres.numpy(), np.float32))
    if isinstance(part, Ramp):
        width, low, high = (graph.constant(value, np.float32) for value in (part.width, -part.limit, part.limit))
        return graph.add("Clip", graph.add("Div", x, width), low, high)
    if isinstance(part, BoundedConv):
        weight, bias = (graph.constant(value.detach().numpy(), np.float32) for value in (part.weight, part.bias))
        y = graph.add("Conv", x, weight, bias, strides=[part.stride] * 2)
        half, last = len(part.weight) // 2, np.iinfo(np.int64).max
        pairs = [
            graph.add("Slice", y, *(graph.constant([bound], np.int64) for bound in (begin, end, 1)))
            for begin, end in ((0, half), (half, last))
        ]
        return graph.add("Concat", graph.add("Max", *pairs), graph.add("Min", *pairs), axis=1)
    return graph.add("Mul", x, graph.constant(part.factor.numpy(), np.float32))


def _sort_layer(graph: _Graph, layer: SortLinear, x: str) -> str:
    if isinstance(layer, SortConv):
        # (batch, patches, pixels) -> (batch, patches, channels) -> channels first, flat
        where = layer.patches(torch.arange(math.prod(layer.in_shape), dtype=torch.float64)[None]).to(torch.int64)
        patches = graph.add("Gather", x, graph.constant(where.numpy(), np.int64), axis=1)
        return graph.flat(graph.add("Transpose", _sorted_distances(graph, layer, patches, 2), perm=[0, 2, 1]))
    return _sorted_distances(graph, layer, x, 1)


def _sorted_distances(graph: _Graph, layer: SortLinear, x: str, axis: int) -> str:
    """(..., in) -> (..., out), where ``axis`` is the last one of x."""
    rows = graph.add("Unsqueeze", x, graph.constant([axis], np.int64))
    weight = graph.constant(layer.weight.detach().numpy(), np.float32)
    distances, axes = graph.add("Abs", graph.add("Sub", rows, weight)), graph.constant([axis + 1], np.int64)
    if len(layer.mix) == 1:
        return graph.add("ReduceMax", distances, axes, keepdims=0)
    largest, _ = graph.top(distances, len(layer.mix))
    mixed = graph.add("Mul", largest, graph.constant(layer.mix.numpy(), np.float32))
    return graph.add("ReduceSum", mixed, axes, keepdims=0)


def _certificate(graph: _Graph, bound: ErrorBound, scores: str, magnitudes: list[str]) -> None:
    """Margin and radius as in :func:`sortrl.nets.float_bounds.margin_radius`."""

    def number(value: float) -> str:
        return graph.constant(value, np.float64)

    values, indices = graph.top(scores, 2)
    graph.column(indices, 0, "action")
    graph.column(indices, 1, "runner_up")
    values = graph.to_double(values)
    margin = graph.add("Sub", graph.column(values, 0), graph.column(values, 1), name="margin")
    # 2 (error at the state + error at its perturbed twin, which lies within margin / 2L): as one affine map.
    weights = graph.constant(4.0 * np.array(bound.per_magnitude)[:, None], np.float64)
    together = graph.add("Concat", *magnitudes, axis=1)
    at_state = graph.column(graph.add("MatMul", together, weights), 0)
    at_reach = graph.add("Mul", margin, number(bound.per_reach / bound.lipschitz))
    slack = graph.add("Add", graph.add("Add", at_state, at_reach), number(4.0 * bound.constant))
    radius = graph.add("Mul", graph.add("Sub", margin, slack), number(RADIUS_DOWN / (2.0 * bound.lipschitz)))
    meaningful = graph.add(
        "And",
        graph.add("Greater", radius, number(SMALLEST_RADIUS)),
        graph.add("Less", slack, number(LARGEST_ERROR)),
    )
    largest = graph.add("ReduceMax", together, graph.constant([1], np.int64), keepdims=0)
    far = graph.add("Add", largest, graph.add("Mul", radius, number(bound.peak)))
    meaningful = graph.add("And", meaningful, graph.add("Less", far, number(LARGEST_NUMBER)))
    wrong = graph.add("Or", graph.add("IsNaN", "obs"), graph.add("IsInf", "obs"))
    wrong = graph.flat(graph.add("Cast", wrong, to=graph.onnx.TensorProto.FLOAT))
    count = graph.add("ReduceSum", wrong, graph.constant([1], np.int64), keepdims=0)
    finite = graph.add("Equal", count, graph.constant(0.0, np.float32))
    graph.add("Where", graph.add("And", meaningful, finite), radius, number(0.0), name="radius")


def _onnx() -> Any:
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as error:
        raise MissingDependency("Writing ONNX needs a package: pip install 'sortrl[onnx]'") from error
    return onnx
