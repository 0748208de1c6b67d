"""What a process needs from the system: deadlines, signals, open files, its parent's end."""
