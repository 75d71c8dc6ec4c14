"""The messages of Tinker's protocol that travel as protobuf, made from a table of their fields, so that nothing of the SDK is
needed.

A type ends in `*` if the field is repeated and in `?` if its absence is known; `{T}` is a map from names to T. Fields of one
message whose types have the same `|group` exclude one another.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tinker_public"

_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
STOP, LENGTH = 0, 1
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4

# In the order of the fields' numbers, from 1.
_MESSAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "SampleResponse": (
        ("sequences", "SampledSequence*"),
        ("prompt_logprobs", "bytes?"),
        ("topk_prompt_logprobs", "TopkLogprobs?"),
        ("prompt_cache_hit_tokens", "int32"),
    ),
    "SampledSequence": (
        ("stop_reason", "StopReason"),
        ("tokens", "bytes"),
        ("logprobs", "bytes?"),
        ("topk_sampled_logprobs", "TopkLogprobs?"),
    ),
    "TopkLogprobs": (("token_ids", "bytes"), ("logprobs", "bytes"), ("k", "uint32"), ("length", "uint32")),
    "SparseCsr": (("values", "bytes"), ("crow_indices", "bytes"), ("col_indices", "bytes")),
    "Tensor": (
        ("dense", "bytes|encoding"),
        ("sparse_csr", "SparseCsr|encoding"),
        ("dtype", "DType"),
        ("shape", "int64*"),
    ),
    "BatchedTensor": (("data", "bytes"), ("offsets", "bytes"), ("dtype", "DType"), ("trailing_shape", "int64*")),
    "ArrayRecord": (("type_tag", "string"), ("fields", "{BatchedTensor}"), ("num_datums", "int64")),
    "ForwardBackwardOutput": (
        ("loss_fn_output_type", "string"),
        ("loss_fn_outputs", "ArrayRecord*"),
        ("metrics", "{double}"),
    ),
    "ForwardBackwardRequest": (
        ("model_id", "string"),
        ("seq_id", "int32"),
        ("data", "Datum*"),
        ("loss_fn", "string"),
        ("loss_fn_config", "{double}"),
        ("forward_only", "bool"),
        ("loss_fn_config_v2", "{LossConfigValue}"),
    ),
    "LossConfigValue": (("number", "double|value"), ("text", "string|value")),
    "Datum": (
        ("model_input", "Chunk*"),
        ("loss_fn_inputs", "{Tensor}"),
        ("model_input_spans", "ProvenanceSpan*"),
        ("loss_fn_input_spans", "ProvenanceSpan*"),
    ),
    "ProvenanceSpan": (("prompt_tokens", "SequenceSpan|span"), ("sampled_tokens", "SequenceSpan|span")),
    "SequenceSpan": (("sequence_id", "string"), ("offset", "int64"), ("length", "int64")),
    "Chunk": (("encoded_text", "TextChunk|chunk"), ("image", "OtherChunk|chunk"), ("dmel", "OtherChunk|chunk")),
    "TextChunk": (("tokens", "bytes"),),
    "OtherChunk": (),
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bytes", "string", "int32", "int64", "uint32", "double", "bool")
}


def _typed(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{kind}"


def _add_map(message: descriptor_pb2.DescriptorProto, field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    entry = message.nested_type.add(name=field.name.title().replace("_", "") + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _typed(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
    field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="nmoe_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        groups = list(dict.fromkeys(kind.partition("|")[2] for _, kind in fields if "|" in kind))
        for group in groups:
            message.oneof_decl.add(name=group)
        for number, (field_name, written) in enumerate(fields, 1):
            kind, _, group = written.partition("|")
            field = message.field.add(name=field_name, number=number, label=_Field.LABEL_OPTIONAL)
            if kind.startswith("{"):
                _add_map(message, field, kind[1:-1])
                continue
            if group:
                field.oneof_index = groups.index(group)
            if kind.endswith("*"):
                field.label = _Field.LABEL_REPEATED
            if kind.endswith("?"):  # as proto3 writes it, a group with one member
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field_name}")
            _typed(field, kind.rstrip("*?"))
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_described())


def message(name: str) -> Any:
    """Returns the class of a message: `message("ForwardBackwardRequest").FromString(body)`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
