"""What holds for every test."""

import os

import pytest
import torch

# The tensors here are small: a second thread costs more in waiting than it saves in work.
torch.set_num_threads(1)

pytest.register_assert_rewrite("tests.browser")  # fixtures, which test modules import as well

if not torch.cuda.is_available():
    # Read when Triton is imported, so before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, by name, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
