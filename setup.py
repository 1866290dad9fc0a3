"""Names the subpackages; everything else stands in pyproject.toml.

setuptools can find packages below a prefix only from here: pyproject.toml would need every folder by name.
"""

from setuptools import find_packages, setup

ROOTS = ("converter", "mappings", "engines")
FOLDERS = [*ROOTS, *(f"{root}.{name}" for root in ROOTS for name in find_packages(root))]

setup(packages=[f"areal_convert.{folder}" for folder in FOLDERS])
