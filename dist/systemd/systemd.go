// Package systemd holds the units of the service, for `agentbox setup systemd` and
// for packages. Packages replace nothing but the path of the program.
package systemd

import "embed"

// Program is the path that ExecStart= has in the unit.
const Program = "/usr/bin/agentbox"

// Files are the units, and what makes their group and directory.
//
//go:embed *.service *.socket *.conf
var Files embed.FS
