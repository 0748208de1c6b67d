"""Runs on several machines, by Ray.

machines.py     the four variables of torch's launchers: machines that become a Ray cluster
ray_engine.py   a run on a Ray cluster: its processes are where Ray places them
"""
