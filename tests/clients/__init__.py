"""Programs that others wrote, against a real server. They need packages of their own: `make
test-clients` installs them."""
