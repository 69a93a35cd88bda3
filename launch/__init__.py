"""Start commands of the other packages as Slurm jobs or local jobs, and restart failed jobs.

The package imports only `fem_common`; torch is imported inside jobs only.

``launch submit`` describes a job once, in ``launch/job.json`` of the job's directory. From then on,
the supervisor makes all decisions from that file and from the run's own files. The supervisor
(``python -m launch.supervise``) runs inside the job.
"""
