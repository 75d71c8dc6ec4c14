"""Families of one's own: registered by a program or offered by an installed package, and names that are taken."""

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_models import tiny_family

from nmoe.config import registry
from nmoe.config.registry import Registry
from nmoe.errors import UserError
from nmoe.model import checkpoint, families
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.families import FAMILIES, llama, register_family


class Renamed:
    """Llama's decoder under another model_type."""

    MODEL_TYPE = "renamed"
    PACKINGS = llama.PACKINGS
    config_from_hf = staticmethod(llama.config_from_hf)
    config_to_hf = staticmethod(llama.config_to_hf)
    entries = staticmethod(llama.entries)
    ignores = staticmethod(llama.ignores)


@pytest.fixture(autouse=True)
def fresh(renamed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with nmoe's own families alone, which has not looked for those of packages yet."""
    table = Registry("family", FAMILIES.group, FAMILIES.builtin)
    for module in (families, checkpoint):
        monkeypatch.setattr(module, "FAMILIES", table)


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    export_model(tiny_family("llama"), tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "renamed"}))
    return tmp_path / "base"


def same_weights(directory: Path) -> bool:
    theirs = tiny_family("llama").state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in load_model(directory).state_dict().items())


def test_a_registered_family_loads_its_checkpoints(renamed: Path) -> None:
    with pytest.raises(UserError, match="model_type = 'renamed' is not a family nmoe knows"):
        load_model(renamed)
    assert register_family(Renamed) is Renamed  # as a decorator has to
    assert same_weights(renamed)


def test_a_package_offers_a_family(renamed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("package_of_families")
    module.Offered = Renamed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    offer = EntryPoint("renamed", "package_of_families:Offered", "nmoe.families")
    monkeypatch.setattr(registry, "entry_points", lambda group: [offer] if group == "nmoe.families" else [])
    assert same_weights(renamed)


def test_a_name_taken_twice_is_refused_with_both_places() -> None:
    class Other(Renamed):
        pass

    register_family(Renamed)
    register_family(Renamed)  # a notebook's cell run again
    with pytest.raises(UserError, match=r"'renamed' is registered twice: by test_open_families:Renamed and by .*Other"):
        register_family(Other)
    with pytest.raises(UserError, match=r"'llama' is registered twice: by nmoe and by nmoe\.model\.families\.llama"):
        register_family(llama)


def test_a_family_that_forgets_a_weight_is_a_mistake_and_not_a_model_of_zeros(
    renamed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(config):
        return (entry for entry in llama.entries(config) if "up_proj" not in entry.theirs)

    monkeypatch.setattr(Renamed, "entries", staticmethod(forgetful))
    monkeypatch.setattr(Renamed, "ignores", staticmethod(lambda name, config: True))
    register_family(Renamed)
    with pytest.raises(ValueError, match=r"the family's entries fill \d+ of its \d+ values"):
        load_model(renamed)
