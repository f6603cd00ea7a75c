"""The one version of all the packages: their build files read it from here."""

__version__ = "0.1.0"
