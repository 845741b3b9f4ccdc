"""What an ONNX file tells of the network it was exported from: tensors by their names, and constants along paths.

Exporters keep the names of biases, norms and embeddings, but transpose the weights of linear layers and fold slices of
tables, and call what comes out `onnx::MatMul_123`. Those get their names back from the nodes that use them.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .errors_vit_scratch import EnvironmentFault, InputError

__all__ = ["OnnxGraph", "check_input"]


class OnnxGraph:
    """The nodes and constants of a file; node and attribute names are those of the ONNX operators."""

    def __init__(self, path: str | Path):
        self.model = _read(path)
        graph = self.model.graph
        self.producers = {output: node for node in graph.node for output in node.output}
        self.consumers: dict[str, list[Any]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self.consumers[name].append(node)
        self.parameters = _arrays(self.model, path)
        self.constants = {**self.parameters, **_constant_nodes(graph)}

    def producer(self, name: str, *op_types: str) -> Any | None:
        """Returns the node that computes `name`, if it is one of these operators."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type in op_types else None

    def split_inputs(self, node: Any) -> tuple[np.ndarray | None, str | None]:
        """Returns the constant among the two inputs of a node, and the name of the other."""
        constants = [self.constants[name] for name in node.input if name in self.constants]
        others = [name for name in node.input if name not in self.constants]
        return (constants[0] if constants else None), (others[0] if others else None)

    def named_parameters(self) -> dict[str, np.ndarray]:
        """Returns the parameters by the names they had in the network, linear weights as (out, in)."""
        named = {name: array for name, array in self.parameters.items() if "::" not in name}
        for node in self.model.graph.node:
            if node.op_type == "MatMul" and node.input[1] in self.parameters:
                name = self._linear_weight_name(node)
                if name is not None:
                    named[name] = self.parameters[node.input[1]].T
        return named

    def _linear_weight_name(self, matmul: Any) -> str | None:
        for node in self.consumers[matmul.output[0]]:
            biases = [name for name in node.input if name in self.parameters and name.endswith(".bias")]
            if node.op_type == "Add" and biases:
                return biases[0].removesuffix("bias") + "weight"
        scope = matmul.name.strip("/").rpartition("/")[0]  # of a layer without bias: /encoder/layer.0/mlp/fc1/MatMul
        return f"{scope.replace('/', '.')}.weight" if scope else None

    def epsilon(self, layer_norm: str) -> float | None:
        """Returns the epsilon of the LayerNorm of this name, whether it is one node or written out."""
        for node in self.consumers[f"{layer_norm}.weight"]:
            if node.op_type == "LayerNormalization":
                return next((_shortest(a.f) for a in node.attribute if a.name == "epsilon"), 1e-5)  # ONNX's default
            divided = self.producer(self.split_inputs(node)[1] or "", "Div")
            root = divided and self.producer(divided.input[1], "Sqrt")
            total = root and self.producer(root.input[0], "Add")
            value = None if total is None else self.split_inputs(total)[0]
            if value is not None:
                return _shortest(float(value))
        return None

    def output_of(self, layer_norm: str) -> str | None:
        """Returns the name of what the LayerNorm of this name computes."""
        nodes = self.consumers[f"{layer_norm}.bias"]
        return nodes[0].output[0] if nodes else None

    def operators_until_matmul(self, bias: str) -> dict[str, Any]:
        """Returns the nodes by operator between the addition of this bias and the next matrix product."""
        found: dict[str, Any] = {}
        todo = [node.output[0] for node in self.consumers[bias]]
        while todo:
            for node in self.consumers[todo.pop()]:
                if node.op_type != "MatMul":
                    found[node.op_type] = node
                    todo += node.output
        return found

    def last_dimension_after(self, bias: str) -> int | None:
        """Returns the last dimension that the sum with this bias is reshaped to, where it is a constant."""
        for addition in self.consumers[bias]:
            for reshape in self.consumers[addition.output[0]]:
                shape = self.constants.get(reshape.input[1]) if reshape.op_type == "Reshape" else None
                concatenated = reshape.op_type == "Reshape" and self.producer(reshape.input[1], "Concat")
                if concatenated:
                    shape = self.constants.get(concatenated.input[-1])
                if shape is not None and shape.reshape(-1)[-1] > 0:
                    return int(shape.reshape(-1)[-1])
        return None

    def depends_on_input(self, name: str) -> bool:
        """Whether `name` is computed from the graph's first input, if only from its shape."""
        todo, seen = [name], {name}
        while todo:
            current = todo.pop()
            if current == self.model.graph.input[0].name:
                return True
            node = self.producers.get(current)
            new = set(node.input) - seen if node is not None else set()
            seen |= new
            todo += new
        return False

    def path_to_constant(self, name: str) -> tuple[np.ndarray, list[Any]] | None:
        """Returns the constant that `name` is made of by moving and resizing alone, and the nodes between."""
        path: list[Any] = []
        while name not in self.constants:
            node = self.producer(name, "Cast", "Identity", "Reshape", "Resize", "Transpose")
            if node is None:
                return None
            path.append(node)
            name = node.input[0]
        return self.constants[name], path

    def computing(self, output: str) -> bytes:
        """Returns a model that computes `output` alone, for images of any size that its nodes can serve."""
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim, ("B", "C", "H", "W"), strict=True):
            if name != "C":
                dim.dim_param = name
        element = model.graph.input[0].type.tensor_type.elem_type
        del model.graph.output[:], model.graph.value_info[:]
        model.graph.output.append(onnx.helper.make_tensor_value_info(output, element, None))
        return model.SerializeToString()

    def concatenations(self) -> Iterator[Any]:
        """Yields the concatenations along the second axis: of tokens, where a ViT has them."""
        for node in self.model.graph.node:
            if node.op_type == "Concat" and any(a.name == "axis" and a.i == 1 for a in node.attribute):
                yield node


def _read(path: str | Path) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise EnvironmentFault(
            f"{path}: ONNX is read by packages that are not here; pip install onnx onnxruntime"
        ) from error
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path))
    except DecodeError as error:
        raise InputError(f"{path} is no whole ONNX file ({error}); get it again") from error
    except OSError as error:  # the weights may lie in files of their own beside it
        raise InputError(
            f"{path}: {error.strerror or error}; a model with external data needs all its files"
        ) from error
    except onnx.checker.ValidationError as error:
        raise InputError(
            f"{path}: {' '.join(str(error).split())}; a model with external data needs all its files"
        ) from error
    if not model.graph.node:
        raise InputError(f"{path} holds no ONNX graph; get it again")
    return model


def check_input(graph: Any, path: str | Path) -> None:
    """Raises unless the first input can be the pixels (B, C, H, W) in float32."""
    from onnx import TensorProto

    given = {tensor.name for tensor in graph.initializer}  # old exporters list parameters among the inputs
    if not graph.input or graph.input[0].name in given:
        raise InputError(f"{path}: the graph has no input for images; export the network with one")
    pixels = graph.input[0]
    num_axes = len(pixels.type.tensor_type.shape.dim)
    if num_axes != 4:
        raise InputError(f"{path}: the input {pixels.name} has {num_axes} axes instead of 4 (B, C, H, W) of images")
    if (element := pixels.type.tensor_type.elem_type) != TensorProto.FLOAT:
        kinds = {number: name for name, number in TensorProto.DataType.items()}
        raise InputError(
            f"{path}: the input {pixels.name} is {kinds.get(element, element)}; export the network in float32"
        )


def _arrays(model: Any, path: str | Path) -> dict[str, np.ndarray]:
    from onnx import numpy_helper

    try:
        return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    except ValueError as error:  # fewer bytes than the shape asks for
        raise InputError(f"{path} is no whole ONNX file ({error}); get it again") from error


def _constant_nodes(graph: Any) -> dict[str, np.ndarray]:
    from onnx import numpy_helper

    return {
        node.output[0]: numpy_helper.to_array(attribute.t)
        for node in graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    }


def _shortest(value: float) -> float:
    """Returns what was written before the value became a float32: 1e-6, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))
