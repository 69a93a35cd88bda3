"""Starts the other rooms' commands as Slurm or local jobs and keeps them going. Imports `fem_common` alone; torch inside jobs only.

A job is described once, in ``launch/job.json`` of its directory, by whoever submits it; from then on the supervisor that runs inside
the job (``python -m launch.supervise``) decides by what it reads there and in the run's own files.
"""
