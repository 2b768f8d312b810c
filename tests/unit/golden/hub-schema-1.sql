-- The tables of a hub of schema 1, as gym-fed of that time made them.
BEGIN TRANSACTION;
CREATE TABLE accounts (
	contributor VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	public_key BLOB NOT NULL, 
	status VARCHAR NOT NULL, 
	enrolled_at FLOAT NOT NULL, 
	PRIMARY KEY (contributor), 
	UNIQUE (public_key)
);
CREATE TABLE credits (
	server_round INTEGER NOT NULL, 
	contributor VARCHAR NOT NULL, 
	amount INTEGER NOT NULL, 
	PRIMARY KEY (server_round, contributor)
);
CREATE TABLE invites (
	token_hash VARCHAR NOT NULL, 
	note VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT NOT NULL, 
	used_by VARCHAR, 
	PRIMARY KEY (token_hash)
);
CREATE TABLE ledger (
	sequence INTEGER NOT NULL, 
	kind VARCHAR NOT NULL, 
	body TEXT NOT NULL, 
	previous_hash VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	signature BLOB NOT NULL, 
	PRIMARY KEY (sequence), 
	UNIQUE (hash)
);
CREATE TABLE messages (
	message_id VARCHAR NOT NULL, 
	node_id INTEGER NOT NULL, 
	group_id VARCHAR NOT NULL, 
	message_type VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	ttl_seconds FLOAT NOT NULL, 
	fingerprint VARCHAR NOT NULL, 
	content BLOB NOT NULL, 
	state VARCHAR NOT NULL, 
	lease_until FLOAT NOT NULL, 
	progress VARCHAR NOT NULL, 
	reply BLOB, 
	receipt TEXT, 
	replied_at FLOAT, 
	PRIMARY KEY (message_id)
);
CREATE TABLE nodes (
	node_id INTEGER NOT NULL, 
	contributor VARCHAR NOT NULL, 
	instance VARCHAR NOT NULL, 
	connected_until FLOAT NOT NULL, 
	PRIMARY KEY (node_id), 
	UNIQUE (contributor, instance)
);
CREATE TABLE objects (
	sha256 VARCHAR NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (sha256)
);
CREATE TABLE readers (
	sha256 VARCHAR NOT NULL, 
	contributor VARCHAR NOT NULL, 
	PRIMARY KEY (sha256, contributor)
);
CREATE TABLE round_tasks (
	server_round INTEGER NOT NULL, 
	node_id BIGINT NOT NULL, 
	message_id VARCHAR NOT NULL, 
	outcome VARCHAR NOT NULL, 
	PRIMARY KEY (server_round, node_id)
);
CREATE TABLE rounds (
	server_round INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	spec TEXT, 
	base_height INTEGER NOT NULL, 
	opened_at FLOAT NOT NULL, 
	deadline FLOAT, 
	merging TEXT, 
	reason TEXT NOT NULL, 
	closed_at FLOAT, 
	PRIMARY KEY (server_round)
);
CREATE TABLE settings (
	"key" VARCHAR NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE TABLE updates (
	update_id VARCHAR NOT NULL, 
	contributor VARCHAR NOT NULL, 
	server_round INTEGER NOT NULL, 
	message_id VARCHAR NOT NULL, 
	manifest TEXT NOT NULL, 
	signature BLOB NOT NULL, 
	nonce VARCHAR NOT NULL, 
	delta_sha256 VARCHAR NOT NULL, 
	delta_bytes BIGINT NOT NULL, 
	norm FLOAT, 
	verdict VARCHAR NOT NULL, 
	code VARCHAR NOT NULL, 
	reason TEXT NOT NULL, 
	heldout_change FLOAT, 
	ledger_sequence INTEGER NOT NULL, 
	received_at FLOAT NOT NULL, 
	PRIMARY KEY (update_id), 
	UNIQUE (contributor, nonce)
);
CREATE TABLE uploads (
	contributor VARCHAR NOT NULL, 
	sha256 VARCHAR NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (contributor, sha256)
);
CREATE TABLE versions (
	height INTEGER NOT NULL, 
	digest VARCHAR NOT NULL, 
	server_round INTEGER NOT NULL, 
	soup_sha256 VARCHAR NOT NULL, 
	soup_bytes BIGINT NOT NULL, 
	residual VARCHAR, 
	heldout_before FLOAT, 
	heldout_after FLOAT, 
	num_updates INTEGER NOT NULL, 
	committed_at FLOAT NOT NULL, 
	PRIMARY KEY (height), 
	UNIQUE (digest), 
	UNIQUE (server_round)
);
CREATE INDEX ix_messages_state ON messages (state);
CREATE INDEX ix_messages_fingerprint ON messages (fingerprint);
CREATE INDEX ix_messages_node_id ON messages (node_id);
CREATE INDEX ix_updates_server_round ON updates (server_round);
COMMIT;
