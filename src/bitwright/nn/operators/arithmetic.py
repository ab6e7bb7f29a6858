"""Arithmetic between tensors, and sums over one."""

import operator as py

import torch
import torch.nn.functional as F

from bitwright.nn.activation_parts import gated
from bitwright.nn.attention_parts import AttentionProduct, add_mask
from bitwright.nn.operators.base import Operator, Source, register_operator

_ELEMENTWISE: dict[str, tuple[Source, ...]] = {
    "add": (py.add, py.iadd, torch.add, "add", "add_", "__add__", "__radd__", "__iadd__"),
    "sub": (py.sub, py.isub, torch.sub, torch.subtract, "sub", "sub_"),
    "mul": (py.mul, py.imul, torch.mul, torch.multiply, "mul", "mul_", gated),
    "div": (py.truediv, py.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_"),
    "add_mask": (add_mask,),
}
_PRODUCTS = (py.matmul, torch.matmul, torch.bmm, torch.mm, "matmul", "bmm", "mm", "__matmul__")

for _name, _sources in _ELEMENTWISE.items():
    register_operator(Operator(_name, _sources, binary=True, elementwise=True))
register_operator(Operator("matmul", _PRODUCTS, binary=True))
register_operator(Operator("scaled_dot_product_attention", (F.scaled_dot_product_attention, AttentionProduct)))
register_operator(Operator("mean", (torch.mean, "mean")))
register_operator(Operator("sum", (torch.sum, "sum")))
register_operator(Operator("cat", (torch.cat, torch.concat, torch.concatenate)))
register_operator(Operator("stack", (torch.stack,)))
