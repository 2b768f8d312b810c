#!/bin/sh
# Write the secrets that are missing into secrets/, one file each, readable by you and by the containers alone.
set -eu
cd "$(dirname "$0")"
mkdir -p -m 0700 secrets
random() { head -c 24 /dev/urandom | base64 | tr -d '+/=\n'; }
for name in hub-passphrase postgres-password s3-secret-key grafana-password; do
    [ -s "secrets/$name" ] || random > "secrets/$name"
done
[ -s secrets/s3-access-key ] || printf hub > secrets/s3-access-key
cat > secrets/s3.json << END
{"identities": [{"name": "hub", "actions": ["Admin"],
  "credentials": [{"accessKey": "$(cat secrets/s3-access-key)", "secretKey": "$(cat secrets/s3-secret-key)"}]}]}
END
chmod 0444 secrets/* # the folder is closed to others, and each container has its own user
