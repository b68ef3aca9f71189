"""The package is described in setup.cfg, but for what cannot be said there: recipes/ becomes hvdkit/recipes/."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["hvdkit", "hvdkit.*"]), "hvdkit.recipes"],
    package_dir={"hvdkit.recipes": "recipes"},
    # The scripts are data: run and copied by their path, imported by nothing.
    package_data={
        "hvdkit": ["*.pyi", "py.typed"],
        "hvdkit.launch": ["bin/*"],
        "hvdkit.launch.submission": ["templates/*.j2"],
        "hvdkit.report": ["templates/*"],
        "hvdkit.runtimes": ["constraints/*.txt", "patches/*.patch"],
        "hvdkit.simulator": ["clusters/*.yaml", "clusters/*.json", "evidence.yaml"],
        "hvdkit.recipes": ["*.yaml", "*.json", "*/*.py"],
    },
)
