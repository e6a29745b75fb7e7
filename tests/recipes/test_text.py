"""Recipes as YAML: strict reading, changes from the command line, and writing that reads back the same."""

import contextlib

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rowwise import SpecError
from rowwise.recipes.model_configs import DcnConfig, UserModel
from rowwise.recipes.recipe import Data, Recipe
from rowwise.recipes.text import apply_change, decode, dropped_keys, parse, read, write

BASE = "data: {dataset: synthetic}\n"
TABLE = "tables: {list: [{name: a, rows: 3, dim: 4%s}]}\n"


def load(text, *changes):
    sections = parse(text, "my.yaml")
    for change in changes:
        apply_change(sections, change)
    return decode(sections, "my.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed: 3", "my.yaml: no key 'sed'; did you mean 'seed'?"),
        ("zzz: 3", "no key 'zzz'. There are about, "),
        ("train: {epoch: 3}", "no key 'epoch' in train; did you mean 'epochs'?"),
        (
            "train: {optimizer: {kind: adam, lrr: 3}}",
            "in train.optimizer; did you mean 'lr'? There are beta1, beta2, eps",
        ),
        (
            "model: {kind: dcn, cross: 2}",
            "in model; did you mean 'crosses'? There are crosses, deep, dropout, gated, norm",
        ),
        ("columns: {labels: [y], sparse: [{column: a}, {colum: b}]}", "no key 'colum' in columns.sparse[1]; did you"),
        (TABLE % ", dims: 4", "no key 'dims' in tables.list[0]; did you mean 'dim'?"),
        (
            TABLE % ", optimizer: {kind: adam, lrr: 1}",
            "in tables.list[0].optimizer; did you mean 'lr'? There are beta1",
        ),
        ("tables: {each: {user: {rws: 4}}}", "no key 'rws' in tables.each[...]; did you mean 'rows'?"),
        ("data: {dataset: synthetic}", "my.yaml: line 2: 'data' is given twice: expected each key once"),
        ("train: {batch: 2,\n  batch: 3}", "line 3: 'batch' is given twice"),
        ("train: {epochs: two}", "my.yaml: Expected `int`, got `str` - at `train.epochs`"),
        ("train: {epochs: 2.0}", "got `float` - at `train.epochs`"),
        ("train: 3", "Expected `object`, got `int` - at `train`"),
        ("train: {epochs: 0}", "train.epochs=0: expected at least 1"),
        ("train: {shuffle: no}", "Expected `bool`, got `str` - at `train.shuffle`"),
        ("train: {shuffle: on}", "Expected `bool`, got `str`"),
        ("train: {shuffle: yes}", "Expected `bool`, got `str`"),
        ("train: {batch: 010}", "Expected `int`, got `float`"),  # neither 8 nor 10 without a word
        ("train: {batch: 1e3}", "Expected `int`, got `float`"),
        ("train: {batch: 10:20}", "Expected `int`, got `str`"),
        ("train: {optimizer: {lr: 3}}", "field `kind` - at `train.optimizer`; expected kind: adagrad or adam or sgd"),
        (
            "train: {optimizer: {kind: adamw}}",
            "'adamw' - at `train.optimizer.kind`; expected kind: adagrad or adam or sgd",
        ),
        ("model: {kind: graph, encoder: gat}", "gat' - at `model.encoder`; expected lightgcn or graphsage"),
        ("model: {kind: dlmr}", "expected kind: autoint or dcn or deepfm or dhen or dien or din or dlrm"),
        ("name: ../up", "name='../up': expected letters, digits"),
        ("1: 2", "Expected `str` - at `key` of the recipe"),
        ("? [a]\n: 2", "my.yaml: not YAML: "),
        ("x: !!python/name:os.system ''", "the tag 'tag:yaml.org,2002:python/name:os.system': expected plain values"),
        ("---\nseed: 3", "expected a single document"),
        ("train: {batch: 3", "not YAML: while parsing a flow mapping"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(SpecError) as caught:
        load(BASE + text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_and_numbers_mean_what_they_look_like():
    train = "train: {optimizer: {kind: adam, lr: 1e-3, eps: .5}, batch: 0x10, steps: 1_000}\n"
    about = "about: {what: 2024-01-01, run: no, machine: '007'}\n"
    recipe = load(BASE + train + about + "log: {profile: 10:20}\nname: on\n")
    assert (recipe.train.optimizer.lr, recipe.train.optimizer.eps) == (0.001, 0.5)
    assert (recipe.train.batch, recipe.train.steps) == (16, 1000)
    assert (recipe.log.profile, recipe.name) == ("10:20", "on")
    assert (recipe.about.what, recipe.about.run, recipe.about.machine) == ("2024-01-01", "no", "007")


def test_an_empty_section_is_as_if_it_were_not_there():
    assert load(BASE + "train:\nevaluate:\n  # every: 3\n") == load(BASE)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "- 1\n- 2\n", "synthetic", "3"])
def test_what_is_no_recipe(text, tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="recipe with a section"):
        read(path)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(bytes(range(128, 256)))
    with pytest.raises(SpecError, match="read as a recipe"):
        read(tmp_path / "binary.yaml")
    (tmp_path / "zero.yaml").write_bytes(bytes(10))
    with pytest.raises(SpecError, match=r"zero\.yaml: not YAML: "):
        read(tmp_path / "zero.yaml")
    with pytest.raises(SpecError, match=r"recipe: .*No such file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(SpecError, match="read as a recipe"):
        read(tmp_path / "folder.yaml")


def test_a_recipe_is_called_like_its_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(BASE)
    assert read(tmp_path / "mine.yaml").name == "mine"
    assert read(tmp_path / "mine.yaml", ["name=yours"]).name == "yours"


@pytest.mark.parametrize(
    ("text", "change", "get", "want"),
    [
        (BASE, "train.batch=7", lambda r: r.train.batch, 7),
        (BASE, "train.optimizer.lr=1e-2", lambda r: r.train.optimizer.lr, 0.01),  # of the kind that it is by default
        (BASE, "train.optimizer={kind: sgd, lr: 1}", lambda r: r.train.optimizer.lr, 1.0),
        (BASE, "model.top=[3, 4]", lambda r: r.model.top, (3, 4)),
        (BASE, "model=mine.py:Mine", lambda r: r.model, "mine.py:Mine"),
        (BASE, "tables.each.user.rows=9", lambda r: r.tables.each["user"].rows, 9),
        (BASE + TABLE % "", "tables.list.0.rows=9", lambda r: r.tables.list[0].rows, 9),
        (BASE + TABLE % "", "tables.list.0.optimizer.lr=9", lambda r: r.tables.list[0].optimizer.lr, 9.0),
        (BASE + "model: {kind: dcn, deep: [1, 2]}", "model.deep.1=5", lambda r: r.model.deep, (1, 5)),
        (BASE + "train:", "train.epochs=2", lambda r: r.train.epochs, 2),
        (BASE, "about.what='a: b'", lambda r: r.about.what, "a: b"),
        (BASE, "about.what=a=b", lambda r: r.about.what, "a=b"),
        (BASE, "data.dataset=csv:a b.csv", lambda r: r.data.dataset, "csv:a b.csv"),
        (BASE, "evaluate.patience=null", lambda r: r.evaluate.patience, None),
        (BASE, "model={kind: own, module: m.py:M}", lambda r: r.model.module, "m.py:M"),
        (
            "model: {kind: own, module: m.py:M}\n" + BASE,
            "model.args.width.deep=3",
            lambda r: r.model.args["width"],
            {"deep": 3},
        ),
    ],
)
def test_changes(text, change, get, want):
    assert get(load(text, change)) == want


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (BASE, "train.epochs", "--set train.epochs: expected section.key=value"),
        (BASE, "=3", "expected section.key=value"),
        (BASE, "train..epochs=3", "expected section.key=value"),
        (BASE, "train.epoch=3", "no key 'epoch' in train; did you mean 'epochs'?"),
        (BASE, "trian.epochs=3", "no key 'trian'; did you mean 'train'?"),
        (BASE, "train.epochs.x=3", "Expected `int`, got `object` - at `train.epochs`"),
        (
            BASE + "train: {epochs: 2}",
            "train.epochs.x=3",
            "--set train.epochs.x=3: train.epochs is 2, which has no keys",
        ),
        (
            BASE + TABLE % "",
            "tables.list.1.rows=3",
            "--set tables.list.1.rows=3: tables.list is a list of 1: expected an index",
        ),
        (BASE + TABLE % "", "tables.list.first.rows=3", "tables.list is a list of 1: expected an index"),
        (BASE + TABLE % "", "tables.list.\u0660.optimizer.kind=sgd", "tables.list is a list of 1: expected an index"),
        (BASE + TABLE % "", "tables.list.\u00b2.optimizer.kind=sgd", "tables.list is a list of 1: expected an index"),
        (BASE, "train.batch=two", "Expected `int`, got `str`"),
        (BASE, "about.what=a: b: c", "is not a YAML value: expected quotes"),
        (BASE, "about.what=a: b", "Expected `str`, got `object` - at `about.what`"),
        (BASE, "tables.all.optimizer.lr=3", "`tables.all.optimizer`; expected kind: adagrad or adam or ftrl"),
        (BASE, "model.args.x=3", "no key 'args' in model"),
    ],
)
def test_wrong_changes(text, change, message):
    with pytest.raises(SpecError) as caught:
        load(text, change)
    assert message in str(caught.value)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    [
        "no",
        "on",
        "1e-3",
        "0E0",
        "1_0",
        "10:20",
        "2024-01-01",
        "~",
        "null",
        "0x1",
        ": ",
        "# a",
        "- b",
        "'",
        '"',
        "{}",
        "a: b",
        " ",
        "é\u2028",
    ]
)
COUNTS = st.integers(1, 10**6)
NUMBERS = st.floats(1e-6, 1e6)
PLAIN = {
    msgspec.inspect.NoneType: st.none(),
    msgspec.inspect.BoolType: st.booleans(),
    msgspec.inspect.IntType: COUNTS,
    msgspec.inspect.FloatType: NUMBERS,
}
SPECIAL = {
    ("Recipe", "name"): st.sampled_from(["", "a", "A-1.b_c", "no", "1e3", "007"]),
    ("Recipe", "seed"): st.integers(0, (1 << 63) - 1),
    ("Data", "valid_share"): st.floats(0, 0.4),
    ("Data", "test_share"): st.floats(0, 0.4),
    ("Table", "name"): st.sampled_from(["a", "no", "1e3", "0x1"]),
    ("Table", "column_group"): st.none(),
    ("TuneRange", "low"): st.floats(0.1, 1),
    ("TuneRange", "high"): st.floats(2, 3),
    ("Sampling", "rate"): st.floats(0.1, 1),
    ("UserFunction", "function"): st.sampled_from(["own.py:twice", "a b/own.py:f"]),
    ("Log", "profile"): st.none() | st.just("10:20"),
    ("UserModel", "args"): st.dictionaries(
        TEXTS, TEXTS | st.integers(-5, 5) | st.lists(st.booleans(), max_size=2), max_size=3
    ),
    **{(kind, beta): st.floats(0, 0.9) for kind in ("Adam", "RowWiseAdam", "Lamb") for beta in ("beta1", "beta2")},
    ("Sparse", "feature"): st.just(""),
}


def of_type(kind, made=None):
    """A strategy for a type as recipes have them."""
    info = msgspec.inspect.type_info(kind) if made is None else made
    match info:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            special = {name: made for (of, name), made in SPECIAL.items() if of == cls.__name__}
            parts = {f.name: special[f.name] if f.name in special else optional(f) for f in fields}
            return st.builds(lambda **given: accepted(cls, given), **parts).filter(lambda x: x is not None)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([of_type(None, t) for t in types])
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(of_type(None, item), min_size=1, max_size=2).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*(of_type(None, item) for item in items))
        case msgspec.inspect.DictType(value_type=value):
            return st.dictionaries(TEXTS, of_type(None, value), max_size=2)
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case msgspec.inspect.LiteralType(values=options):
            return st.sampled_from(list(options))
        case _:
            return PLAIN.get(type(info), TEXTS)


def optional(field):
    """Its default as often as not, so that recipes stay small."""
    made = of_type(None, field.type)
    if field.required:
        return made
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return st.just(default) | made


def accepted(cls, given):
    """All that is given, or where that is refused, what is required and each other key that is accepted beside it."""
    try:
        return cls(**given)
    except SpecError:
        required = {field.name for field in msgspec.structs.fields(cls) if field.required}
    found, chosen = None, {}
    for name in sorted(given, key=lambda name: name not in required):
        with contextlib.suppress(SpecError, TypeError):
            found = cls(**chosen, **{name: given[name]})
            chosen[name] = given[name]
        if name in required:
            chosen[name] = given[name]
    return found


@given(of_type(Recipe), st.booleans())
@example(Recipe(data=Data(dataset="synthetic")), False)
@settings(max_examples=60)
def test_written_and_read_is_the_same(recipe, defaults):
    text = write(recipe, defaults=defaults)
    assert decode(parse(text, "again"), "again") == recipe
    assert write(decode(parse(text, "again"), "again"), defaults=defaults) == text


def without_keys(value, plain):
    """Keys of structs that a written recipe does not have."""
    if isinstance(value, msgspec.Struct):
        names = [field.name for field in msgspec.structs.fields(value)]
        missing = [name for name in names if name not in plain]
        return missing + [one for name in names for one in without_keys(getattr(value, name), plain.get(name))]
    if isinstance(value, dict):
        return [one for key, inner in value.items() for one in without_keys(inner, plain[key])]
    if isinstance(value, tuple):
        return [one for inner, of in zip(value, plain, strict=True) for one in without_keys(inner, of)]
    return []


@given(of_type(Recipe))
@settings(max_examples=60)
def test_every_key_is_written_if_asked_for(recipe):
    """Those without a value as null; leaving these out, as former versions did, makes the same recipe."""
    sections = parse(write(recipe, defaults=True), "again")
    assert without_keys(recipe, sections) == []
    if not isinstance(recipe.model, UserModel):  # whose arguments are the user's own
        assert decode(without_nulls(sections), "former") == recipe


def without_nulls(plain):
    if isinstance(plain, dict):
        return {key: without_nulls(value) for key, value in plain.items() if value is not None}
    return [without_nulls(value) for value in plain] if isinstance(plain, list) else plain


def test_what_is_default_is_written_if_asked_for():
    recipe = Recipe(data=Data(dataset="synthetic"))
    assert write(recipe) == "data:\n  dataset: synthetic\n"
    assert "epochs: 1\n" in write(recipe, defaults=True)
    shown = write(recipe, shown=("train.epochs", "data.share"))
    assert "train:\n  epochs: 1\n" in shown
    assert "share: random\n" in shown
    assert "batch" not in shown


def test_another_kind_leaves_nothing_of_the_first():
    sections = {"data": {"dataset": "synthetic"}, "model": {"kind": "dlrm", "bottom": [8], "top": [8]}}
    apply_change(sections, "model.kind=dlrm")
    assert sections["model"] == {"kind": "dlrm", "bottom": [8], "top": [8]}
    apply_change(sections, "model.kind=dcn")
    apply_change(sections, "model.deep=[4]")
    assert decode(sections, "mine").model == DcnConfig(deep=(4,))


def test_keys_that_a_change_of_kind_drops_are_named(tmp_path):
    model = "{kind: dlrm, bottom: [8], top: [4], norm: null}"
    text = f"data: {{dataset: synthetic}}\nmodel: {model}\ntrain: {{optimizer: {{kind: sgd}}}}\n"
    (tmp_path / "a.yaml").write_text(text)
    changes = ("model=dcn", "model.deep=[4]", "train.optimizer.kind=adam", "train.optimizer.lr=0.1")
    assert dropped_keys(tmp_path / "a.yaml", changes) == ["--set model=dcn drops bottom, top of the recipe's dlrm"]
    for changes in (("model.kind=dlrm", "model.top=[3]"), ("model={kind: dcn, deep: [4]}",)):
        assert dropped_keys(tmp_path / "a.yaml", changes) == []


def test_a_kind_alone_is_short_for_a_section_of_that_kind():
    sections = {"model": {"kind": "dlrm", "top": [3]}, "train": {"optimizer": {"kind": "sgd", "lr": 1.0}}}
    for change in ("model=deepfm", "train.optimizer=adagrad", "tables.all.optimizer=sgd"):
        apply_change(sections, change)
    assert sections["model"] == {"kind": "deepfm"}
    assert sections["train"] == {"optimizer": {"kind": "adagrad"}}
    assert sections["tables"]["all"] == {"optimizer": {"kind": "sgd"}}
    apply_change(sections, "data.workers=null")
    assert sections["data"] == {"workers": None}
    apply_change(sections, "model=mine.py:Net")
    assert sections["model"] == "mine.py:Net"
