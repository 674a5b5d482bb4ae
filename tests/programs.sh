#!/bin/sh
# Installs with apt what the tests run that is no Python package, and tells what is left out for want of the rest.
set -u
export DEBIAN_FRONTEND=noninteractive
export RUNLEVEL=1 # none of them is to run as a service
PATH="$PATH:/usr/sbin"

# program, or any of several / package, or any of several / what is left out without it
programs() {
	cat <<-'END'
		chromium|chromium-browser|google-chrome chromium tests of pages are skipped
		haproxy haproxy attacks through it are skipped
		ip iproute2 nodes of a cluster share one address, and tests that cut links are skipped
		mosquitto mosquitto tests of the bus against it are skipped
		nginx nginx-light|nginx attacks through it are skipped
		redis-server redis-server the store is tested against the embedded one only
		strace strace aegis lab token-path is not tested
	END
}

any_of() { echo "$1" | tr '|' ' '; }
found() { for one in $(any_of "$1"); do command -v "$one" >/dev/null && return; done; false; }
missing() { programs | while read -r program packages without; do found "$program" || echo "$program $packages $without"; done; }
may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
install() { apt-get -qq install -y --no-install-recommends "$@" >/dev/null 2>&1; }

[ -n "$(missing)" ] || exit 0
if may_install; then
	echo "Installing programs that the tests run."
	apt-get -qq update
	# one transaction; where one of them is not to be had, each by itself
	install $(missing | while read -r _ packages _; do any_of "$packages" | cut -d ' ' -f 1; done) ||
		missing | while read -r _ packages _; do for one in $(any_of "$packages"); do install "$one" && break; done; done
fi
missing | while read -r program packages without; do
	hint=""
	may_install || hint="; on Debian: sudo apt-get install $(any_of "$packages" | cut -d ' ' -f 1)"
	echo "No ${program%%|*}: $without$hint." >&2
done
