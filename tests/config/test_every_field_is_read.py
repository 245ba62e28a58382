"""A setting that nothing reads would be accepted and ignored. Each declared field must be read somewhere in the package.

Reads are found in the source: an attribute of something that is known to be a section, because it is annotated as one
(`config: RunConfig`), is a section's own `self`, or hangs on an attribute named like a section (`self.config.train.steps`).
A dotted key in a string of the loader (`"model.preset"`) is a read as well.
"""

import ast
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

import telamon
from telamon.config import keys, registry, schema
from telamon.layers import rope

SOURCE = Path(telamon.__file__).parent
FAMILIES = [name for name in registry.families() if registry.family(name).__module__.startswith("telamon.")]
# Read by name over all axes, in `AxisSizes.sizes`; and by pydantic, to tell kinds of scaling apart.
BY_NAME = {(schema.AxisSizes, axis) for axis in schema.AXES} | {
    (kind, "kind") for kind in (rope.LinearScaling, rope.Llama3Scaling, rope.YarnScaling)
}


def sections() -> dict[str, type[BaseModel]]:
    """Every class of the config, by name: the run's sections and the families' own."""
    found: dict[str, type[BaseModel]] = {"RunConfig": schema.RunConfig}
    for name in FAMILIES:
        for key in keys.walk(registry.family(name)):
            for section in (key.owner, key.section):
                for base in section.__mro__ if section else ():
                    if issubclass(base, BaseModel) and base not in (BaseModel, schema.Section):
                        found[base.__name__] = base
    return found


def owner(section: type[BaseModel], field: str) -> type[BaseModel]:
    """The class that declares a field first, so that a read through a subclass counts for it."""
    return [base for base in section.__mro__ if issubclass(base, BaseModel) and field in base.model_fields][-1]


class Reads(ast.NodeVisitor):
    """Collects (class, field) pairs."""

    def __init__(self, classes: dict[str, type[BaseModel]]):
        self.classes, self.known, self.found = classes, {}, set()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self.known
        self.known = {**outer, "self": self.classes.get(node.name)}
        self.generic_visit(node)
        self.known = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self.known
        self.known = dict(outer)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            named = argument.annotation and ast.unparse(argument.annotation).strip("'\"").split(".")[-1]
            if named:
                self.known[argument.arg] = self.classes.get(named)
        self.generic_visit(node)
        self.known = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.known[target.id] = self.resolve(node.value)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(name, ast.Name):
                        self.known[name.id] = self.resolve(value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension_of(self, node: ast.AST) -> None:
        for loop in getattr(node, "generators", ()):
            self.bind(loop.target, loop.iter)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        names = [name.id for name in ast.walk(target) if isinstance(name, ast.Name)]
        classes = [found for part in ast.walk(value) if isinstance(part, ast.Attribute | ast.Name) and (found := self.resolve(part))]
        for name in names:
            self.known[name] = classes[0] if classes else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        section = self.resolve(node.value)
        if section is not None and node.attr in section.model_fields:
            self.found.add((owner(section, node.attr), node.attr))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        section, _, field = str(node.value).rpartition(".")
        if section in schema.RunConfig.model_fields:
            self.found.add((section_class(schema.RunConfig.model_fields[section].annotation), field))

    def resolve(self, node: ast.expr) -> type[BaseModel] | None:
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            section = self.resolve(node.value)
            if section is not None and node.attr in section.model_fields:
                return section_class(section.model_fields[node.attr].annotation)
            if node.attr in schema.RunConfig.model_fields:
                return section_class(schema.RunConfig.model_fields[node.attr].annotation)
        return None


def section_class(annotation: typing.Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := section_class(part))), None)


@pytest.fixture(scope="module")
def reads() -> set[tuple[type[BaseModel], str]]:
    visitor = Reads(sections())
    for file in SOURCE.rglob("*.py"):
        visitor.visit(ast.parse(file.read_text(encoding="utf-8")))
    return visitor.found | BY_NAME


@pytest.mark.parametrize("name", FAMILIES)
def test_every_declared_field_is_read(reads, name):
    declared = {}
    for key in keys.walk(registry.family(name)):
        field = key.path.rpartition(".")[2]
        declared[key.path] = (owner(key.owner, field), field)
    unread = [path for path, read in declared.items() if read not in reads]
    assert not unread, f"declared, but nothing reads them: {', '.join(unread)}"


def test_a_field_that_nothing_reads_would_be_noticed(reads):
    assert (schema.TrainConfig, "no_such_field") not in reads
    assert (schema.SourceConfig, "steps") not in reads
    assert (schema.GroupConfig, "match") in reads, "through a loop over optimizer.groups"
