"""The plugin offers its indicators beside qsync-planner's."""

from __future__ import annotations

import pytest
from qsync_indicators_example import plugin

from qsync_core.errors import ObservationError
from qsync_core.plugins.registry import Registry
from qsync_planner.indicators import available_indicators, get_indicator


@pytest.mark.parametrize("name", ["paper", "hessian", "random"])
def test_an_indicator_is_found_by_its_name_where_the_plugin_is(name: str) -> None:
    registry = Registry()
    registry.register(plugin, name="qsync-indicators-example")
    assert {"hutchinson", "lossvar", name} <= set(available_indicators(registry))
    assert get_indicator(name, registry).name == name
    with pytest.raises(ObservationError, match=f"there is no indicator {name!r}; choose one of hutchinson, lossvar"):
        get_indicator(name, Registry())
