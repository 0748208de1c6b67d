"""What one process needs of its system: deadlines, signals, open files, the end of its parent."""
