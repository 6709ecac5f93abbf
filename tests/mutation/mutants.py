"""One small change of a module at a time: what a slip of the keyboard could have written instead.

| kind | change |
|---|---|
| arithmetic | ``+`` and ``-``, ``*`` and ``+``, ``/`` and ``*``, ``<<`` and ``>>``, ... |
| comparison | ``<`` and ``<=``, ``==`` and ``!=``, ``is`` and ``is not``, ``in`` and ``not in`` |
| boolean | ``and`` and ``or``, a ``not`` or sign left out, ``if`` turned round, the branches of ``a if c else b`` swapped |
| constant | a number one larger, ``True`` and ``False`` |
| return | ``return x`` gives ``None`` |

Left alone: annotations, docstrings, messages (f-strings and everything within ``raise``, ``warn`` and ``_check``'s lambda).
"""

import ast
import copy
from typing import NamedTuple

SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutant(NamedTuple):
    index: int
    column: int
    kind: str
    lines: range  # of the statement part that changed, in the original
    old: str
    new: str
    source: str  # of the whole module


def _left_alone(tree: ast.Module) -> set[int]:
    """Ids of nodes whose change no test should care about."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        roots += [a for a in (getattr(node, "annotation", None), getattr(node, "returns", None)) if a is not None]
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Lambda):
            roots += [node] if not isinstance(node, ast.Lambda) or isinstance(node.body, ast.JoinedStr) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            roots.append(node)
    return {id(inner) for root in roots for inner in ast.walk(root)}


def _changes(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """(kind, node to put in its place) of one node."""
    found: list[tuple[str, ast.AST]] = []

    def changed(kind: str, **fields: object) -> None:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        found.append((kind, new))

    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SWAPS:
        changed("arithmetic", op=SWAPS[type(node.op)]())
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            changed("comparison", ops=[*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BoolOp):
        changed("boolean", op=SWAPS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp):
        found.append(("boolean" if isinstance(node.op, ast.Not) else "arithmetic", node.operand))
    elif isinstance(node, ast.IfExp):
        changed("boolean", body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.If):
        changed("boolean", test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changed("constant", value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        changed("constant", value=node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        changed("return", value=ast.Constant(None))
    return found


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def mutants(text: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    tree = ast.parse(text)
    skip, found = _left_alone(tree), []
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            for position, node in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(node, ast.AST) or id(node) in skip:
                    continue
                for kind, new in _changes(node):
                    shown = [ast.unparse(n.test if isinstance(n, ast.If) else n) for n in (node, new)]
                    last = node.test.end_lineno if isinstance(node, ast.If) else node.end_lineno
                    _put(parent, field, position, value, new)
                    source = ast.unparse(ast.fix_missing_locations(tree))
                    _put(parent, field, position, value, node)
                    found.append((node.lineno, node.col_offset, kind, range(node.lineno, last + 1), *shown, source))
    found.sort(key=lambda m: m[:3])
    return [Mutant(i, *m[1:]) for i, m in enumerate(found)]


def _put(parent: ast.AST, field: str, position: int, value: object, node: ast.AST) -> None:
    if isinstance(value, list):
        value[position] = node
    else:
        setattr(parent, field, node)
