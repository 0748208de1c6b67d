"""What people see of a run: numbers, tables, curves, its folder."""
