"""From Metal source to C++ that clang understands: kernels, attributes, threadgroup variables, vectors, literals.

The text is rewritten token by token and keeps its lines, so that diagnostics and debug information refer to what the
user wrote. Everything that is not recognised is left for the compiler to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import classes, constants, forbidden
from .constants import Constant
from .errors import refuse
from .tokens import after, angle, attributes, before, closing, line_of, newlines, plain, split, tokens

GRID_VALUES = {
    "thread_position_in_grid": 100,
    "thread_position_in_threadgroup": 101,
    "threadgroup_position_in_grid": 102,
    "thread_index_in_simdgroup": 103,
    "simdgroup_index_in_threadgroup": 104,
    "threads_per_threadgroup": 105,
    "threads_per_grid": 106,
    "threadgroups_per_grid": 107,
    "thread_index_in_threadgroup": 108,
    "simdgroups_per_threadgroup": 109,
    "dispatch_simdgroups_per_threadgroup": 109,
    "threads_per_simdgroup": 110,
    "thread_execution_width": 110,
    "dispatch_threads_per_threadgroup": 111,
    "quadgroup_index_in_threadgroup": 112,
    "thread_index_in_quadgroup": 113,
}
# Attributes that may stand in a source; anything else is refused rather than dropped.
_ATTRIBUTES = {
    *GRID_VALUES, "kernel", "host_name", "buffer", "max_total_threads_per_threadgroup", "maybe_unused", "likely",
    "unlikely", "fallthrough", "nodiscard", "clang",
}  # fmt: skip
_LAUNCH_ATTRIBUTES = {"function_constant", "threadgroup"}  # what torch.mps cannot give, and other runtimes can
SCALARS = ("float", "half", "bfloat", "int", "uint", "short", "ushort", "char", "uchar", "long", "ulong", "bool")
VECTORS = {f"{s}{n}" for s in SCALARS for n in (2, 3, 4)}
_PACKED = {f"packed_{s}{n}" for s in SCALARS for n in (2, 4) if s != "bool"}
_DECLARED = re.compile(r"(?:const |thread |device |constant |threadgroup )*([\w:]+(?: ?<.*>)?)(?: ?[*&])* ?(\w*)$")
_FLOAT = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?|0[xX][\da-fA-F.]+[pP][+-]?\d+")
THREADGROUP = 200  # slot of [[threadgroup(0)]]


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its declaration, and the buffer slot or the number of the grid value it receives.

    A slot from ``THREADGROUP`` on is threadgroup memory that the launch gives. An ``optional`` one belongs to a
    function constant, and may be left unbound.
    """

    text: str
    slot: int
    optional: bool = False

    @property
    def name(self) -> str:
        return str(re.findall(r"\w+", self.text.partition("[")[0])[-1])


@dataclass(frozen=True)
class Declaration:
    """A kernel function; ``template`` is its template header, ``limit`` the text of its largest group, each or ""."""

    name: str
    template: str
    limit: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Entry:
    """A kernel as the host sees it: ``expression`` names the function or the template's instance.

    ``signature`` has the types of its parameters where the template's arguments follow from them.
    """

    host: str
    expression: str
    kernel: str
    signature: str = ""


@dataclass
class Unit:
    """A rewritten source, its kernels, the names of its threadgroup variables by number, its function constants."""

    text: str
    declarations: dict[str, Declaration] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    constants: dict[int, Constant] = field(default_factory=dict)
    foreign: bool = False
    methods: list[str] = field(default_factory=list)  # as in classes.Methods


def _first_extent(ts: Sequence[str]) -> int:
    """Index of the bracket that begins a declarator's array extents, or the end."""
    angles = 0
    for k, t in enumerate(ts):
        angles += angle(ts, k)
        if t == "[" and angles == 0:
            return k
    return len(ts)


def _parameters(ts: Sequence[str], line: int, kernel: str, foreign: bool) -> tuple[Parameter, ...]:
    out: list[Parameter] = []
    for part in split(ts):
        if plain(part) in ("", "void"):
            continue
        names = [n for _, _, group in attributes(part) for n in group]
        inside = {k for b, e, _ in attributes(part) for k in range(b, e)}
        text = plain([t for k, t in enumerate(part) if k not in inside])
        optional = foreign and any(n.startswith("function_constant") for n in names)
        if optional:
            names = [n for n in names if not n.startswith("function_constant")]
        out.append(Parameter(text, _slot(names, text, out, line, kernel, foreign), optional))
    return tuple(out)


def _slot(names: list[str], text: str, earlier: list[Parameter], line: int, kernel: str, foreign: bool) -> int:
    for name in names:
        if foreign and (match := re.fullmatch(r"threadgroup ?\( ?(\d+) ?\)", name)):
            return THREADGROUP + int(match[1])
        if match := re.fullmatch(r"buffer ?\( ?(\d+) ?\)", name):
            return int(match[1])
        if name in GRID_VALUES:
            return GRID_VALUES[name]
        if name.startswith("threadgroup"):
            raise refuse(f"{kernel}: {text}: compile_shader has no dynamic threadgroup memory; declare an array", line)
        raise refuse(f"{kernel}: {text}: [[{name}]] is not available through compile_shader", line)
    if re.search(r"[*&\[]", text):  # buffers without a number take the free ones in order
        taken = {p.slot for p in earlier}
        return next(k for k in range(len(earlier) + 1) if k not in taken)
    raise refuse(f"{kernel}: {text}: a parameter that is no buffer needs an attribute", line)


class Rewriter:
    """One pass over the tokens of a preprocessed source."""

    def __init__(self, text: str, foreign: bool, kernels: Sequence[str] | None) -> None:
        self.ts, self.foreign, self.kernels = tokens(text), foreign, kernels
        self.unit = Unit("", foreign=foreign)
        self.edits: list[tuple[int, int, str]] = []
        self.bodies: list[tuple[int, int]] = []
        self.instances: list[tuple[str | None, str, str]] = []

    def run(self) -> Unit:
        forbidden.in_text(self.ts)
        self._functions()
        self._check_attributes()
        if self.foreign:
            self.unit.constants, edits = constants.declared(self.ts)
            self.edits += edits
        for begin, end, _ in attributes(self.ts):
            self.edits.append((begin, end, newlines(self.ts[begin:end])))
        self.unit.methods, edits = classes.methods(self.ts)
        self.edits += edits
        self._array_parameters()
        self._threadgroup_variables()
        self._expressions()
        strings = self._strings()
        self.unit.text = strings + self._edited()
        known = self.unit.declarations
        for host, expression, signature in self.instances:
            name = re.match(r"\w+", expression.split("::")[-1])
            if name and name[0] in known:
                self.unit.entries.append(Entry(host or plain(tokens(expression)), expression, name[0], signature))
        used = {e.kernel for e in self.unit.entries}
        self.unit.entries += [Entry(n, n, n) for n, d in known.items() if n not in used and not d.template]
        if self.kernels is not None:
            self.unit.entries = [e for e in self.unit.entries if e.host in self.kernels]
        return self.unit

    def _edited(self) -> str:
        out, done = [], 0
        for begin, end, text in sorted(self.edits, key=lambda e: (e[0], e[1])):
            if begin < done:
                continue  # inside something that was replaced as a whole
            out += [*self.ts[done:begin], text]
            done = end
        return "".join([*out, *self.ts[done:]])

    def _functions(self) -> None:
        ts, i, header = self.ts, 0, None
        while i < len(ts):
            if ts[i] == "template":
                j = after(ts, i)
                if ts[j] == "<":
                    end = closing(ts, j)
                    header, i = (i, end + 1), end + 1
                    continue
                i = self._instance(i)
                continue
            if ts[i] in (";", "{", "}"):
                header = None
            is_attribute = ts[i] == "[" and i + 1 < len(ts) and ts[i + 1] == "["
            end = closing(ts, i) if is_attribute else i
            if ts[i] == "kernel" or (is_attribute and re.match(r"\[\[\s*kernel\b", "".join(ts[i : end + 1]))):
                i, header = self._kernel(i, header), None
                continue
            i = end + 1

    def _instance(self, i: int) -> int:
        """An explicit instantiation: with a host_name it is a kernel of the library, else plain C++."""
        ts = self.ts
        end = next(k for k in range(i, len(ts)) if ts[k] == ";")
        body = [t for t in ts[i + 1 : end] if t[0] != "#"]
        names = [n for _, _, group in attributes(body) for n in group]
        host = next(("".join(re.findall(r'"([^"]*)"', n)) for n in names if n.startswith("host_name")), None)
        is_kernel = host is not None or "kernel" in names or "kernel" in body
        if not is_kernel:
            return end + 1
        inside = {k for b, e, _ in attributes(body) for k in range(b, e)}
        rest = [t for k, t in enumerate(body) if k not in inside and t != "kernel"]
        k, signature = after(rest, -1), ""
        if rest[k] == "decltype":
            expression = plain(rest[closing(rest, after(rest, k)) + 1 :])
        else:
            depth = 0
            stop = len(rest)  # the name may stand alone behind a type that was given a name
            for e in range(after(rest, k), len(rest)):
                depth += angle(rest, e)
                if rest[e] == "(" and depth == 0:
                    stop = e
                    break
            expression = plain(rest[k + 1 : stop])
            if "<" not in expression:
                signature = plain(rest[stop + 1 : closing(rest, stop)]) if stop < len(rest) else ""
        self.instances.append((host, expression, signature))
        self.edits.append((i, end + 1, newlines(ts[i : end + 1])))
        return end + 1

    def _kernel(self, i: int, header: tuple[int, int] | None) -> int:
        ts, k, limit = self.ts, self._attributes_before(i), ""
        while ts[k] != "(":
            if ts[k] == "[" and ts[k + 1] == "[":
                end = closing(ts, k)
                for name in next(a for b, _, a in attributes(ts[k : end + 1]) if b == 0):
                    if name.startswith("max_total_threads_per_threadgroup"):
                        limit = name[name.index("(") :]
                k = end
            k += 1
        name, end = ts[before(ts, k)], closing(ts, k)
        line = line_of(ts, i)
        result = ts[before(ts, before(ts, k))]
        if result != "void":
            raise refuse(f"kernel {name} must return void, not {result}", line)
        template = plain(ts[slice(*header)]) if header else ""
        self.unit.declarations[name] = Declaration(
            name, template, limit, _parameters(ts[k + 1 : end], line, name, self.foreign)
        )
        at = header[0] if header else i
        if limit:
            head = template or "template <int = 0>"
            self.edits.append((at, at, f"{head} constexpr int msl_limit_{name}() {{ return {limit}; }} "))
        if ts[i] == "kernel":
            self.edits.append((i, i + 1, ""))
        opening = next((m for m in range(end, len(ts)) if ts[m] in "{;"), len(ts) - 1)
        if ts[opening] == "{":
            self.bodies.append((opening, closing(ts, opening)))
        return opening

    def _attributes_before(self, i: int) -> int:
        while ts_end := before(self.ts, i):
            if self.ts[ts_end] != "]" or self.ts[ts_end - 1] != "]":
                return i
            depth = 0
            for i in range(ts_end, -1, -1):
                depth += (self.ts[i] == "]") - (self.ts[i] == "[")
                if depth == 0:
                    break
        return i

    def _check_attributes(self) -> None:
        for begin, _, names in attributes(self.ts):
            for name in names:
                word = re.match(r"\w*", name)
                if self.foreign and word and word[0] in _LAUNCH_ATTRIBUTES:
                    continue
                if not word or word[0] not in _ATTRIBUTES:
                    constant = "function_constant" in name
                    what = "compile_shader has no function constants" if constant else f"unknown attribute {name!r}"
                    raise refuse(what, line_of(self.ts, begin))

    def _array_parameters(self) -> None:
        """``constant int x[2]`` as a parameter is a pointer, which C++ allows arrays without address spaces alone."""
        ts, parens = self.ts, 0
        for i, t in enumerate(ts):
            parens += (t == "(") - (t == ")")
            if t not in ("device", "constant", "threadgroup") or not parens:
                continue
            k = after(ts, i)
            while re.match(r"[A-Za-z_:]", ts[k]) or angle(ts, k) == 1:
                k = after(ts, closing(ts, k)) if ts[k] == "<" else after(ts, k)
            if ts[k] != "[" or ts[k + 1] == "[":
                continue
            end = rest = closing(ts, k)
            while ts[after(ts, rest)] == "[":  # more extents, or attributes
                rest = closing(ts, after(ts, rest))
            if ts[after(ts, rest)] in (",", ")"):
                name = before(ts, k)
                inner = ts[after(ts, end)] == "[" and ts[after(ts, end) + 1] != "["
                self.edits += [(name, name, "(*" if inner else "*"), (k, end + 1, ")" if inner else "")]

    def _threadgroup_variables(self) -> None:
        """``threadgroup float x[64];`` in a kernel becomes a reference into the running threadgroup's memory."""
        ts, parens = self.ts, 0
        for i, t in enumerate(ts):
            parens += (t == "(") - (t == ")")
            if t != "threadgroup" or parens or self._qualifies_method(i):
                continue
            end = self._declaration_end(i)
            if end is None:
                continue
            line = line_of(ts, i)
            if not any(b < i < e for b, e in self.bodies):
                raise refuse("a threadgroup variable must be declared in a kernel function", line)
            self.edits.append((i, end + 1, self._variable([x for x in ts[i + 1 : end] if x[0] != "#"], line)))

    def _qualifies_method(self, i: int) -> bool:
        k = before(self.ts, i)
        while k >= 0 and self.ts[k] in ("const", "constexpr", "volatile", "noexcept"):
            k = before(self.ts, k)
        return k >= 0 and self.ts[k] == ")"

    def _declaration_end(self, i: int) -> int | None:
        """Index of the semicolon if a variable is declared at ``i``, not a pointer or a template argument."""
        ts, depth, angles = self.ts, 0, 0
        for k in range(i, len(ts)):
            t = ts[k]
            if t in ("(", "["):
                depth += 1
            elif t in (")", "]"):
                depth -= 1
            elif t in ("<", ">"):
                angles += angle(ts, k)
            elif t == ";" and depth == 0:
                return k
            elif t == "=" and depth == angles == 0:
                return next(e for e in range(k, len(ts)) if ts[e] == ";")
            if depth < 0 or angles < 0 or (t in ("*", "&") and depth == 0 and angles == 0) or t in ("{", "}"):
                return None
        return None

    def _variable(self, declaration: list[str], line: int) -> str:
        first, *others = (self._uninitialised(part, line) for part in split(declaration))
        stop = _first_extent(first)
        name_at = before(first, stop)
        kind = plain(first[:name_at])
        declarators = [(first[name_at], plain(first[stop:]))]
        for part in others:
            k = after(part, -1)
            declarators.append((part[k], plain(part[k + 1 :])))
        out = []
        for name, extent in declarators:
            number = len(self.unit.variables)
            self.unit.variables.append(name)
            alias = f"msl_variable_{number}"
            out.append(f"typedef {kind} {alias} {extent};")
            out.append(f"threadgroup {alias}& {name} = MSL_THREADGROUP({alias}, {number});")
        return " ".join(out) + newlines(declaration)

    def _uninitialised(self, declarator: list[str], line: int) -> list[str]:
        """A declarator without ``= {0}``, which MLX has and then writes the zeros itself."""
        depth = 0
        for k, t in enumerate(declarator):
            depth += (t in ("(", "[", "{")) - (t in (")", "]", "}"))
            if t == "=" and depth == 0:
                if not re.fullmatch(r"\{ ?(?:0?\.?0?[fh]? ?)\}", plain(declarator[k + 1 :])):
                    raise refuse("a threadgroup variable cannot be initialised", line)
                return declarator[: before(declarator, k) + 1]
        return declarator

    def _aliases(self) -> set[str]:
        text = plain(self.ts)
        pattern = rf"(?:using (\w+) = |typedef )(?:metal ?:: ?)?(?:vec ?<[^;]*>|{'|'.join(VECTORS)}) ?(\w*) ?;"
        return {a or b for a, b in re.findall(pattern, text)} - {""}

    def _expressions(self) -> None:
        """Vector constructors and casts, which C++ spells or means differently, and literals without a suffix."""
        ts, vectors = self.ts, VECTORS | _PACKED | self._aliases()
        for i, t in enumerate(ts):
            if _FLOAT.match(t):
                self._literal(i)
            elif t == "os_log" and re.match(r"[A-Za-z_]", ts[after(ts, i)]):
                self._log(i)
            elif t == "static_cast":
                j = after(ts, i)
                end = closing(ts, j)
                if not {"*", "&"} & set(ts[j:end]):
                    self.edits.append((i, i + 1, "msl::cast"))
            elif ts[before(ts, self._qualified(i))] == "operator":
                continue  # a conversion of a class to it
            elif t == "vec" and i + 1 < len(ts) and ts[after(ts, i)] == "<":
                end = closing(ts, after(ts, i))
                kind = "".join(ts[i : end + 1])
                if bools := re.fullmatch(r"vec<\s*bool\s*,\s*([234])\s*>", kind):
                    kind = f"bool{bools[1]}"
                    self.edits.append((self._qualified(i), end + 1, kind))
                self._constructor(self._qualified(i), end, kind)
            elif t in vectors and ts[before(ts, self._qualified(i))] not in ("::", ".", "->", "operator"):
                self._constructor(self._qualified(i), i, t)

    def _log(self, i: int) -> None:
        """``constant os_log logger(a, b);``: C++ constructs nothing in constant memory; of a log nothing is read."""
        k = before(self.ts, i)
        while re.match(r"[\w:]", self.ts[k]):
            if self.ts[k] == "constant":
                self.edits.append((k, k + 1, "static const"))
            k = before(self.ts, k)

    def _qualified(self, i: int) -> int:
        """Where a name begins that may stand behind ``metal::`` or ``::``; behind another one, it is that one's."""
        while self.ts[before(self.ts, i)] == "::":
            outer = before(self.ts, before(self.ts, i))
            if self.ts[outer] != "metal" and re.match(r"[A-Za-z_>]", self.ts[outer]):
                return i
            i = outer if self.ts[outer] == "metal" else before(self.ts, i)
        return i

    def _constructor(self, begin: int, end: int, kind: str) -> None:
        ts = self.ts
        follows = after(ts, end)
        if follows >= len(ts):
            return
        full = f"metal::{kind}" if kind.startswith("vec") else kind
        if re.match(r"[A-Za-z_]", ts[follows]):
            self._declarators(follows, full)
        if ts[follows] in ("(", "{"):
            inside = closing(ts, follows)
            if ts[follows] == "{" or ts[after(ts, follows)] not in ("*", "&"):  # not a pointer to a function
                self.edits.append((begin, end + 1, f"msl::make<{full}>"))
                if ts[follows] == "{":
                    self.edits += [(follows, follows + 1, "("), (inside, inside + 1, ")")]

    def _declarators(self, k: int, kind: str) -> None:
        """``float2 a(1, 2), b(c);``: the variables that are declared from ``k`` on, with parentheses, are made."""
        ts = self.ts
        while re.match(r"[A-Za-z_]", ts[k]):
            k = after(ts, k)
            if ts[k] == "(":
                end = closing(ts, k)
                if ts[after(ts, end)] not in (",", ";") or self._are_parameters(ts[k + 1 : end]):
                    return
                self.edits += [(k + 1, k + 1, f"msl::make<{kind}>("), (end, end, ")")]
                k = after(ts, end)
            elif ts[k] == "=":
                while ts[k] not in (",", ";", ")", "}"):
                    k = after(ts, closing(ts, k)) if ts[k] in ("(", "[", "{") else after(ts, k)
            if ts[k] != ",":
                return
            k = after(ts, k)

    @staticmethod
    def _are_parameters(ts: Sequence[str]) -> bool:
        """Whether these are a function's: none, or one that is a type, with a name or without."""
        for part in map(plain, split(ts)):
            type_ = _DECLARED.match(part)
            if not part or (type_ and (type_[2] or type_[1] in VECTORS or type_[1] in SCALARS or " " in part)):
                return True
        return False

    def _strings(self) -> str:
        """A string lies in constant memory, in C++ it does not: the declarations of variables that take their place."""
        ts, out = self.ts, list[str]()
        attribute = {k for b, e, _ in attributes(ts) for k in range(b, e)}
        for i, t in enumerate(ts):
            if t == "__func__":
                text = f'"{self._function_of(i)}"'
            elif t[0] == '"' and i not in attribute and not self._is_message(i):
                text = t
            else:
                continue
            name = f"msl_string_{len(out)}"
            out.append(f"constant const char {name}[] = {text};")
            self.edits.append((i, i + 1, name))
        return " ".join(out) + "\n" if out else ""

    def _is_message(self, i: int) -> bool:
        """Of a static_assert, or part of a longer string, which the compiler must see as it is."""
        ts, depth = self.ts, 0
        if ts[before(ts, i)] == "extern":
            return True
        for k in range(i - 1, -1, -1):
            depth += (ts[k] == ")") - (ts[k] == "(")
            if depth < 0 or ts[k] in (";", "{", "}"):
                return depth < 0 and ts[before(ts, k)] == "static_assert"
        return False

    def _function_of(self, i: int) -> str:
        """The name of the function whose body encloses a token."""
        ts, depth = self.ts, 0
        for k in range(i, -1, -1):
            depth += (ts[k] == "}") - (ts[k] == "{")
            if depth >= 0 or ts[k] != "{":
                continue
            depth = 0  # the next brace out
            m = before(ts, k)
            if ts[m] == ")":
                level = 0
                while m > 0:
                    level += (ts[m] == ")") - (ts[m] == "(")
                    if level == 0:
                        break
                    m -= 1
                name = ts[before(ts, m)]
                if name not in ("if", "for", "while", "switch"):
                    return name
        return ""

    def _literal(self, i: int) -> None:
        t = self.ts[i]
        if _FLOAT.fullmatch(t):
            self.edits.append((i, i + 1, t + "f"))
        elif t.endswith("bf") and not t.startswith(("0x", "0X")):
            self.edits.append((i, i + 1, f"((bfloat){t[:-2]}f)"))
        elif t[-1] in "hH":
            self.edits.append((i, i + 1, f"((half){t[:-1]}f)"))


def rewrite(preprocessed: str, foreign: bool = False, kernels: Sequence[str] | None = None) -> Unit:
    """C++ for a Metal source whose macros have been expanded. Raises SyntaxError where Metal's rules are broken.

    A ``foreign`` source may ask for function constants and threadgroup memory of a launch; of ``kernels`` only those
    that are named become entries.
    """
    return Rewriter(preprocessed, foreign, kernels).run()
