"""The command line of ngramspec. It is installed as the package `ngramspec_cli`; everything that prints is here."""
