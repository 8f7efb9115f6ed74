"""The error tree: codes are unique and complete, and lead back to their class."""

from __future__ import annotations

import gpuworker.errors as errors
from gpuworker.errors import WorkerError, error_class


def _classes() -> list[type[WorkerError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, WorkerError)
    ]


def test_each_code_names_exactly_one_class() -> None:
    codes = [cls.code for cls in _classes()]
    assert len(codes) == len(set(codes))
    assert all(error_class(cls.code) is cls for cls in _classes())


def test_a_code_of_a_newer_worker_is_still_a_worker_error() -> None:
    assert error_class("not_invented_yet") is WorkerError


def test_the_tree_at_the_top_of_the_module_shows_every_class() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        if name[0].isupper():
            assert name in errors.__doc__, name
