"""The extension module; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["hvd_lhc/_build_kernel.py:ffibuilder"])
