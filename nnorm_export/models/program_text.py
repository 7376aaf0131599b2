"""The check that the text of an exported program (the JSON that ``torch.export.save`` writes) is data, not code.

``torch.export.load`` evaluates parts of the text as Python: symbolic sizes by sympy, guards by ``exec``, names by the
code that torch.fx generates, and operators by looking up attributes of ``torch``. Every string must have one of the
forms that ``torch.export.save`` writes. All other text is refused.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from nnorm_export.reading import parse_json


class CodeFoundError(ValueError):
    """The text may run code; the message says where."""


_MAX_CHARACTERS = 10_000  # of an expression
_PLAIN = re.compile(r"[\w.,:/+\-@ \[\]]*")  # names of parameters, devices and versions; no quotes, brackets or newlines
_NEVER_EVALUATED = {"metadata", "as_string", "as_strings"}  # torch keeps these as text
_VALUE_NAMES = {"name", "as_name"}  # they become variables of generated code
_NAMED = {"tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values", "custom_obj_values"}

# Operators that compute. Others may read and write files, call objects, or use the network.
_OPERATORS = re.compile(
    r"torch\.ops\.(aten|prims|nnorm|quantized|quantized_decomposed|torchvision|torchao)\.\w+(\.\w+)?"
    r"|torch\.ops\.higher_order\.(cond|while_loop|scan|map|map_impl|associative_scan|flex_attention|invoke_subgraph"
    r"|wrap_with_set_grad_enabled|wrap_with_autocast|strict_mode)"
    r"|_operator\.(abs|add|and_|eq|floordiv|ge|getitem|gt|index|inv|invert|le|lshift|lt|mod|mul|ne|neg|not_|or_|pos|pow"
    r"|rshift|sub|truediv|xor)"
    r"|math\.(ceil|floor|trunc|sqrt|pow|log|log2|exp|sin|cos|tan|asin|acos|atan|sinh|cosh|tanh)"
    r"|torch\.(sym_\w+|_sym_\w+|_check|_check_is_size)"
    r"|torch\._C\._set_grad_enabled|torch\.amp\.autocast_mode\._(enter|exit)_autocast"
)
_TOUCH_FILES = re.compile(r"torch\.ops\.aten\.(save|from_file|load)\b.*")

_SYMBOLIC = set(
    re.findall(
        r"\w+",
        """
        Symbol Dummy Integer Float Rational Add Mul Pow Mod Abs Max Min And Or Not Eq Ne Lt Le Gt Ge Equality
        Unequality StrictLessThan StrictGreaterThan LessThan GreaterThan Piecewise ExprCondPair Tuple floor
        ceiling sqrt exp log sin cos tan asin acos atan sinh cosh tanh FloorDiv ModularIndexing Where PythonMod
        CleanDiv CeilToInt FloorToInt CeilDiv PowByNatural FloatPow FloatTrueDiv IntTrueDiv
        IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity
        OpaqueUnaryFn_sqrt OpaqueUnaryFn_exp OpaqueUnaryFn_log OpaqueUnaryFn_log2 OpaqueUnaryFn_sin OpaqueUnaryFn_cos
        OpaqueUnaryFn_tan OpaqueUnaryFn_asin OpaqueUnaryFn_acos OpaqueUnaryFn_atan OpaqueUnaryFn_sinh
        OpaqueUnaryFn_cosh OpaqueUnaryFn_tanh
        """,
    )
)
_GUARD_CALLS = _SYMBOLIC | {"size", "stride", "storage_offset", "max", "min", "len", "abs", "int", "float", "round"}
_GUARD_ATTRIBUTES = set(
    re.findall(
        r"\w+",
        """
        size stride storage_offset shape math inf nan ceil floor trunc sqrt log2 sin cos tan asin acos atan sinh cosh
        tanh sym_float _sym_sqrt
        """,
    )
)
_ARITHMETIC_NODES = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp,
    ast.Compare, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.UAdd, ast.USub, ast.Not,
    ast.And, ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Tuple, ast.List,
)  # fmt: skip
_POWERS = {"Pow", "PowByNatural"}  # FloatPow computes in float64, which takes no time
_MOST_POWERS, _GREATEST_EXPONENT = 4, 16  # 9**9**9**9 would keep a processor busy for years


def check_program(text: bytes) -> Any:
    """Returns the JSON ``text`` of a program, or of the list of its weights.

    Raises:
        CodeFoundError: a string in the text may run code.
        ValueError: the text is not JSON.
    """
    program = parse_json(text)
    _check(program)
    return program


def _check(program: Any) -> None:
    waiting = [(program, "")]  # (value, its key); the elements of a list have the key of the list
    while waiting:
        value, key = waiting.pop()
        if isinstance(value, dict):
            for name, item in value.items():
                if key in _NAMED:
                    _check_name(name)
                elif not _PLAIN.fullmatch(name):
                    raise CodeFoundError(f"the key {name[:80]!r}")
                if name not in _NEVER_EVALUATED or not _is_text(item):
                    waiting.append((item, name))
        elif isinstance(value, list):
            waiting += [(item, key) for item in value]
        elif isinstance(value, str):
            _check_string(value, key)


def _is_text(value: Any) -> bool:
    """Whether ``value`` is a string, a list of strings, or metadata: a dict of strings."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return all(isinstance(item, str) for item in items)


def _check_string(text: str, key: str) -> None:
    if key == "expr_str":
        check_expression(text)
    elif key == "guards_code":
        check_expression(text, guard=True)
    elif key in ("target", "as_operator"):
        if not _OPERATORS.fullmatch(text) or _TOUCH_FILES.fullmatch(text):
            raise CodeFoundError(f"it calls {text[:80]!r}")
    elif key in ("in_spec", "out_spec"):
        _check_tree(text)
    elif key in _VALUE_NAMES or key == "forward_arg_names":
        _check_name(text)
    elif not _PLAIN.fullmatch(text):
        raise CodeFoundError(f"the {key or 'text'} {text[:80]!r}")


def _check_name(name: str) -> None:
    if name and not name.isidentifier():
        raise CodeFoundError(f"the name {name[:80]!r}")


def _check_tree(text: str) -> None:
    """Checks the structure of inputs or outputs: names of containers, and keys of dictionaries."""
    waiting: list[Any] = [parse_json(text)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "__enum__" in value or value.get("type") == "collections.defaultdict":  # these import any module
                raise CodeFoundError(f"a container {str(value)[:80]!r}")
            context = value.get("context")
            if isinstance(context, str):
                waiting.append(parse_json(context))
            waiting += [item for name, item in value.items() if name != "context" or not isinstance(context, str)]
            waiting += list(value)
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and not _PLAIN.fullmatch(value):
            raise CodeFoundError(f"the key {value[:80]!r} of a container")


def check_expression(text: str, *, guard: bool = False) -> None:
    """Raises CodeFoundError unless ``text`` is arithmetic on sizes, or (``guard``) a condition on sizes of inputs."""
    try:
        if len(text) > _MAX_CHARACTERS:
            raise CodeFoundError(f"an expression of {len(text)} characters")
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodeFoundError(f"the expression {text[:80]!r}") from error
    called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    quoted = {id(node) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    exponents: list[ast.expr | None] = []
    for node in nodes:
        allowed = isinstance(node, _ARITHMETIC_NODES) or (guard and isinstance(node, (ast.Subscript, ast.Attribute)))
        if isinstance(node, ast.Attribute):
            allowed = allowed and node.attr in _GUARD_ATTRIBUTES
        elif isinstance(node, ast.Name):
            names = _GUARD_CALLS if guard else _SYMBOLIC
            allowed = node.id in names if id(node) in called else _is_symbol(node.id) or (guard and node.id == "torch")
        elif isinstance(node, ast.Call):
            allowed = isinstance(node.func, (ast.Name, ast.Attribute))
            if isinstance(node.func, ast.Name):
                _allow_strings(node, quoted)
                exponents += [_second(node)] if node.func.id in _POWERS and not _is_bounded_power(node) else []
        elif isinstance(node, ast.Subscript) and guard:
            quoted.discard(id(node.slice))  # L['x']: torch replaces it by the input
            allowed = (
                not isinstance(node.slice, ast.Constant)
                or not isinstance(node.slice.value, str)
                or bool(_PLAIN.fullmatch(node.slice.value))
            )
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            exponents.append(node.right)
        if not allowed:
            raise CodeFoundError(f"the expression {text[:80]!r}")
    if quoted or len(exponents) > _MOST_POWERS or not all(map(_is_small, exponents)):
        raise CodeFoundError(f"the expression {text[:80]!r}")


def _is_symbol(name: str) -> bool:
    """Whether ``name`` is a size (s0, u3, zf1) or a constant. sympy would read other names as its own functions."""
    return bool(re.fullmatch(r"[a-z]{1,3}\d+|L|math|inf|oo|int_oo|zoo|nan|true|false|True|False|args|E|pi", name))


def _allow_strings(call: ast.Call, quoted: set[int]) -> None:
    """Removes from ``quoted`` the strings that are names of symbols or digits of numbers."""
    form = {"Symbol": r"[A-Za-z_]\w*", "Dummy": r"[A-Za-z_]\w*", "Float": r"-?[\d.]+(e[+-]?\d+)?"}
    pattern = form.get(getattr(call.func, "id", ""))
    for argument in call.args[:1]:
        text = argument.value if isinstance(argument, ast.Constant) else None
        if pattern and isinstance(text, str) and re.fullmatch(pattern, text):
            quoted.discard(id(argument))


def _second(call: ast.Call) -> ast.expr | None:
    return call.args[1] if len(call.args) > 1 else None


def _is_bounded_power(call: ast.Call) -> bool:
    """Whether ``call`` is PowByNatural(Integer(…), Symbol(…)), which torch computes in 64 bits."""
    names = [getattr(getattr(argument, "func", None), "id", "") for argument in call.args]
    return getattr(call.func, "id", "") == "PowByNatural" and names == ["Integer", "Symbol"]


def _is_small(node: ast.expr | None) -> bool:
    """Whether a power with the exponent ``node`` is soon computed: it is small, or a float in a guard."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "sym_float":
        return True
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Integer", "Rational", "Float"):
        return all(map(_is_small, node.args))
    if isinstance(node, ast.UnaryOp):
        return _is_small(node.operand)
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and (abs(node.value) <= _GREATEST_EXPONENT)
    )
