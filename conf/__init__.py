"""The YAML configuration, as a package so that an installed wheel finds it."""
