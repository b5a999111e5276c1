"""Every stage of a compile as files: text, data, and programs that run."""
