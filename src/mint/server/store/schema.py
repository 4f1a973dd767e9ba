"""The tables of a data directory as SQL, and the steps that bring an older schema forward.

The column types are names only: SQLite stores what it is given. JSON columns hold text, BOOLEAN columns 0 or 1, times
are seconds since the epoch. To add a column: add it here, raise `SCHEMA_VERSION`, write its step, and keep
a data directory of the version before (`tests/service/make_data_directory.py`).
"""

from __future__ import annotations

SCHEMA_VERSION = 10
"""Stored in the file as `PRAGMA user_version`; 0 is an empty file."""

# Lists and sums are read from indexes that hold all columns they need: a directory may have 100,000 checkpoints.
# The indexes on metadata hold its length, so that an owner's total is read without the text itself (`record_bytes`).
TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id VARCHAR NOT NULL PRIMARY KEY,
    instance_id VARCHAR NOT NULL,
    user_metadata JSON,
    last_seen FLOAT NOT NULL,
    ended_at FLOAT,
    owner VARCHAR DEFAULT 'local' NOT NULL,
    details JSON,
    created_at FLOAT,
    suspended_s FLOAT
);
CREATE INDEX IF NOT EXISTS ix_sessions_instance_id ON sessions (instance_id);
CREATE INDEX IF NOT EXISTS ix_sessions_metadata ON sessions (
    owner, coalesce(length(user_metadata), 0) + coalesce(length(details), 0)
);

CREATE TABLE IF NOT EXISTS models (
    model_id VARCHAR NOT NULL PRIMARY KEY,
    session_id VARCHAR NOT NULL,
    base_model VARCHAR,
    lora JSON,
    seed_given BOOLEAN,
    effective JSON,
    applied_seq INTEGER NOT NULL,
    diverged VARCHAR,
    settings_sha256 VARCHAR
);
CREATE INDEX IF NOT EXISTS ix_models_session_id ON models (session_id);

CREATE TABLE IF NOT EXISTS jobs (
    model_id VARCHAR NOT NULL,
    seq_id INTEGER NOT NULL,
    kind VARCHAR NOT NULL,
    payload BLOB,
    sha256 VARCHAR NOT NULL,
    status VARCHAR NOT NULL,
    result BLOB,
    digest VARCHAR,
    attempts INTEGER NOT NULL,
    encoding VARCHAR DEFAULT 'application/json' NOT NULL,
    micro_batching JSON,
    result_sha256 VARCHAR,
    replay VARCHAR,
    PRIMARY KEY (model_id, seq_id)
);

CREATE TABLE IF NOT EXISTS snapshots (
    model_id VARCHAR NOT NULL,
    seq_id INTEGER NOT NULL,
    file VARCHAR NOT NULL,
    digest VARCHAR NOT NULL,
    PRIMARY KEY (model_id, seq_id)
);
CREATE INDEX IF NOT EXISTS ix_snapshots_file ON snapshots (file);

CREATE TABLE IF NOT EXISTS checkpoints (
    model_id VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    folder VARCHAR NOT NULL,
    created_at FLOAT NOT NULL,
    owner VARCHAR DEFAULT 'local' NOT NULL,
    public BOOLEAN DEFAULT 0 NOT NULL,
    expires_at FLOAT,
    size_bytes INTEGER,
    user_metadata JSON,
    expired_s FLOAT,
    PRIMARY KEY (model_id, kind, name)
);
CREATE INDEX IF NOT EXISTS ix_checkpoints_folder ON checkpoints (folder);
CREATE INDEX IF NOT EXISTS ix_checkpoints_created ON checkpoints (created_at DESC, folder, owner, public, expires_at);
CREATE INDEX IF NOT EXISTS ix_checkpoints_owner_created ON checkpoints (
    owner, created_at DESC, folder, expires_at, size_bytes
);
CREATE INDEX IF NOT EXISTS ix_checkpoints_expiring ON checkpoints (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS ix_checkpoints_expired ON checkpoints (expired_s) WHERE expired_s IS NOT NULL;
CREATE INDEX IF NOT EXISTS ix_checkpoints_metadata ON checkpoints (owner, coalesce(length(user_metadata), 0));

CREATE TABLE IF NOT EXISTS samplers (
    sampler_id VARCHAR NOT NULL PRIMARY KEY,
    session_id VARCHAR NOT NULL,
    base_model VARCHAR NOT NULL,
    model_path VARCHAR,
    weights_id VARCHAR,
    file VARCHAR,
    lora JSON,
    seed_root VARCHAR NOT NULL,
    model_id VARCHAR,
    sha256 VARCHAR
);
CREATE INDEX IF NOT EXISTS ix_samplers_session_id ON samplers (session_id);
CREATE INDEX IF NOT EXISTS ix_samplers_model_id ON samplers (model_id);
CREATE INDEX IF NOT EXISTS ix_samplers_weights_id ON samplers (weights_id);
CREATE INDEX IF NOT EXISTS ix_samplers_file ON samplers (file);

CREATE TABLE IF NOT EXISTS runs (
    run_id VARCHAR NOT NULL PRIMARY KEY,
    session_id VARCHAR NOT NULL,
    owner VARCHAR NOT NULL,
    base_model VARCHAR,
    lora JSON,
    user_metadata JSON,
    created_at FLOAT NOT NULL,
    last_request_at FLOAT NOT NULL,
    ended_at FLOAT
);
CREATE INDEX IF NOT EXISTS ix_runs_created ON runs (created_at DESC, run_id, owner, base_model);
CREATE INDEX IF NOT EXISTS ix_runs_owner_created ON runs (owner, created_at DESC, run_id, base_model);
CREATE INDEX IF NOT EXISTS ix_runs_session_id ON runs (session_id);
CREATE INDEX IF NOT EXISTS ix_runs_metadata ON runs (owner, coalesce(length(user_metadata), 0));

CREATE TABLE IF NOT EXISTS keys (
    key_id VARCHAR NOT NULL PRIMARY KEY,
    sha256 VARCHAR NOT NULL UNIQUE,
    owner VARCHAR NOT NULL,
    hint VARCHAR NOT NULL,
    created_at FLOAT NOT NULL,
    last_used_at FLOAT,
    revoked_at FLOAT,
    quotas JSON
);
CREATE INDEX IF NOT EXISTS ix_keys_owner ON keys (owner);
"""

MIGRATIONS = {
    2: """
ALTER TABLE sessions ADD COLUMN owner VARCHAR NOT NULL DEFAULT 'local';
ALTER TABLE sessions ADD COLUMN details JSON;
ALTER TABLE sessions ADD COLUMN created_at FLOAT;
ALTER TABLE jobs ADD COLUMN encoding VARCHAR NOT NULL DEFAULT 'application/json';
ALTER TABLE checkpoints ADD COLUMN owner VARCHAR NOT NULL DEFAULT 'local';
ALTER TABLE checkpoints ADD COLUMN public BOOLEAN NOT NULL DEFAULT 0;
ALTER TABLE checkpoints ADD COLUMN expires_at FLOAT;
ALTER TABLE checkpoints ADD COLUMN size_bytes INTEGER;
ALTER TABLE checkpoints ADD COLUMN user_metadata JSON;
CREATE INDEX ix_sessions_owner ON sessions (owner);
CREATE INDEX ix_checkpoints_owner ON checkpoints (owner);
CREATE TABLE runs (
    run_id VARCHAR PRIMARY KEY,
    session_id VARCHAR NOT NULL,
    owner VARCHAR NOT NULL,
    base_model VARCHAR,
    lora JSON,
    user_metadata JSON,
    created_at FLOAT NOT NULL,
    last_request_at FLOAT NOT NULL,
    ended_at FLOAT
);
CREATE INDEX ix_runs_session_id ON runs (session_id);
CREATE INDEX ix_runs_owner ON runs (owner);
INSERT INTO runs
    SELECT m.model_id, m.session_id, 'local', m.base_model, m.lora, NULL, s.last_seen, s.last_seen, s.ended_at
    FROM models m JOIN sessions s ON s.session_id = m.session_id;
INSERT OR IGNORE INTO runs
    SELECT c.model_id, substr(c.model_id, 1, instr(c.model_id || ':', ':') - 1), 'local', NULL, NULL, NULL,
        min(c.created_at), max(c.created_at), max(c.created_at)
    FROM checkpoints c GROUP BY c.model_id;
""",
    3: "ALTER TABLE jobs ADD COLUMN micro_batching JSON",
    4: """
ALTER TABLE samplers ADD COLUMN model_id VARCHAR;
CREATE INDEX ix_samplers_model_id ON samplers (model_id);
""",
    5: """
ALTER TABLE sessions ADD COLUMN suspended_s FLOAT;
ALTER TABLE checkpoints ADD COLUMN expired_s FLOAT;
""",
    6: """
ALTER TABLE jobs ADD COLUMN result_sha256 VARCHAR;
ALTER TABLE models ADD COLUMN settings_sha256 VARCHAR;
ALTER TABLE samplers ADD COLUMN sha256 VARCHAR;
""",
    7: "ALTER TABLE jobs ADD COLUMN replay VARCHAR",
    8: """
DROP INDEX ix_sessions_owner;
DROP INDEX ix_checkpoints_owner;
DROP INDEX ix_runs_owner;
""",
    9: "",
    10: """
DROP INDEX IF EXISTS ix_runs_created;
DROP INDEX IF EXISTS ix_runs_owner_created;
""",
}
"""Schema version → the statements that lead to it from the version before. New indexes and empty tables come from
`TABLES`."""


def statements(script: str) -> list[str]:
    """The statements of a script; none of them contains a semicolon."""
    return [statement for part in script.split(";") if (statement := part.strip())]
