"""placeholder"""

from .options import LoadOptions, Model


def chat(load: LoadOptions, model: Model = None) -> None:
    """x"""
