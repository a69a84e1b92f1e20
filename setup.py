"""The packages of the wheel; all else stands in pyproject.toml.

The configuration groups lie at the top of the checkout, and inside `harness` in the wheel, where Hydra
finds them as pkg://harness.conf.
"""

from setuptools import find_namespace_packages, find_packages, setup

setup(
    packages=[
        *find_packages(include=["harness*", "runners*"]),
        "hydra_plugins.cudagraph_harness",
        "harness.conf",
        *(f"harness.conf.{group}" for group in find_namespace_packages("conf")),
    ],
    package_dir={"harness.conf": "conf"},
)
