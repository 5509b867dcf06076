#!/usr/bin/env bash
# Unpacks Ceph's monitor, storage daemon and S3 gateway from Debian's packages (66 MB) into a folder of the user's
# cache, for the tests marked `ceph`. Nothing is installed; what the machine lacks of libraries comes along.
# usage: ceph_packages.sh [FOLDER]
set -euo pipefail

cache=~/.cache  # which bash knows without HOME too
folder=${1:-${CEPH_PACKAGES:-${XDG_CACHE_HOME:-$cache}/ranktape/ceph}}
programs=(radosgw radosgw-admin ceph-mon ceph-osd ceph-authtool monmaptool osdmaptool setpriv)

are_there() {
    local program
    for program in "${programs[@]}"; do
        [[ -x $folder/usr/bin/$program ]] || command -v "$program" >/dev/null || return
    done
}

if are_there; then
    echo "Ceph is there: $folder" >&2
    exit
fi
for program in apt-get dpkg; do
    command -v "$program" >/dev/null || { echo "$0: no $program: install radosgw, ceph-mon and ceph-osd yourself" >&2; exit 1; }
done
mkdir -p "$(dirname "$folder")"
new=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$new"' EXIT
mkdir -p "$new/debs/partial" "$new/root"
if [[ $(id -u) == 0 ]]; then
    apt-get update
fi
# Without the lock a user who is not root can download as well.
apt-get install --yes --no-install-recommends --download-only \
    -o Debug::NoLocking=1 -o APT::Sandbox::User=root -o "Dir::Cache::archives=$new/debs" radosgw ceph-mon ceph-osd
for package in "$new"/debs/*.deb; do
    dpkg --extract "$package" "$new/root"
done
chmod 755 "$new/root"
rm -rf "$folder"
mv "$new/root" "$folder"
are_there || { echo "$0: the packages in $folder lack one of: ${programs[*]}" >&2; exit 1; }
echo "Ceph is unpacked: $folder" >&2
