"""placeholder"""

from .options import LoadOptions, Model


def bench(load: LoadOptions, model: Model = None) -> None:
    """x"""
