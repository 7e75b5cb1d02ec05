"""The tables. ``sequence`` orders rows by when they were inserted; ``id`` is what clients see."""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

# Raised with every change that an older version of this program would misread.
SCHEMA_VERSION = 2

# What brings a database from the version before to this one, for each version since the first.
MIGRATIONS = {2: ("ALTER TABLE jobs ADD COLUMN base_fingerprint VARCHAR",)}

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

# A row is inserted after its content is on disk, under files/<id>, and deleted before it.
files = Table(
    "files",
    metadata,
    Column("sequence", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("created_at", Integer, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", String, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    sqlite_autoincrement=True,
)

# ``hyperparameters`` is NULL until the files are validated. ``pending`` is what a client has asked of a running job and
# the worker has not confirmed. ``adapter_path`` is relative to the data folder, and NULL until the job has succeeded.
# ``base_fingerprint`` says which base model a job belongs to; NULL, in jobs from before version 2: to any
# Files may be deleted when the job has ended, so their ids are no foreign keys.
jobs = Table(
    "jobs",
    metadata,
    Column("sequence", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("created_at", Integer, nullable=False),
    Column("started_at", Integer),
    Column("finished_at", Integer),
    Column("status", String, nullable=False, index=True),
    Column("pending", String),
    Column("model", Text, nullable=False),
    Column("base_root", Text, nullable=False),
    Column("base_fingerprint", String),
    Column("training_file", String, nullable=False),
    Column("validation_file", String),
    Column("suffix", String),
    Column("metadata", Text),
    Column("requested", Text, nullable=False),
    Column("hyperparameters", Text),
    Column("adapter_name", Text, nullable=False, unique=True),
    Column("adapter_path", Text),
    Column("error", Text),
    Column("trained_tokens", Integer),
    Column("total_steps", Integer),
    Column("estimated_finish", Integer),
    Column("result_file", String),
    CheckConstraint("status <> 'queued' OR hyperparameters IS NOT NULL", name="queued_jobs_are_resolved"),
    sqlite_autoincrement=True,
)

# ``step`` is set on metrics events only: a step that is reported twice is stored once.
events = Table(
    "events",
    metadata,
    Column("sequence", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("job_id", String, ForeignKey("jobs.id"), nullable=False),
    Column("created_at", Integer, nullable=False),
    Column("level", String, nullable=False),
    Column("type", String, nullable=False),
    Column("message", Text, nullable=False),
    Column("step", Integer),
    Column("data", Text),
    UniqueConstraint("job_id", "step"),
    Index("events_of_job", "job_id", "sequence"),
    sqlite_autoincrement=True,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("sequence", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("job_id", String, ForeignKey("jobs.id"), nullable=False),
    Column("created_at", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("name", Text, nullable=False, unique=True),
    Column("path", Text, nullable=False),
    Column("metrics", Text),
    UniqueConstraint("job_id", "step"),
    sqlite_autoincrement=True,
)
