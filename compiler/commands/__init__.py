"""The commands of `infc`, a group a file: what each takes, and what it prints. compiler/cli.py gives them their names."""
