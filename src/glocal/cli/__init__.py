"""The `glocal` command: one dataclass per subcommand."""
