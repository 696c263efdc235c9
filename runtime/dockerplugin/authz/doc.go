// Package authz is the judge behind a Docker authorization plugin: it refuses
// the calls of Docker's API that a policy forbids.
//
// A call enters through Handler in the form that dockerd tells it (method,
// URI, body), Judge.Judge finds out which endpoint it is for, decodes the body
// with the types that the daemon uses, and holds what it asks for against a
// Policy, a strict YAML document whose zero value is the safe default. The
// answer is a Decision, which names the rule and the key of the policy that
// would allow the call. What cannot be understood is refused: a body that was
// not sent along (dockerd leaves out bodies over 1 MiB and those that are not
// declared as JSON), keys given twice, fields that are not listed in shape.go,
// unknown calls. Reading (GET, HEAD) is allowed.
//
// # Host paths
//
// A path of the host is judged by where it leads once symlinks are resolved,
// the deepest existing ancestor deciding for what does not exist yet. That
// alone is no protection: the daemon keeps the path as a string and resolves it
// again at every start of the container, also at restarts that no call
// announces, so there is no moment at which judging could be final. The judge
// therefore refuses a path whose way could be exchanged later: every directory
// on it has to be owned by root, writable by no other user (sticky directories
// count as safe for what root owns in them), and must not be mountable
// read-write under the same policy, since root in a container could put a
// symlink there. With mounts.allow of /srv/work/* each child of /srv/work can
// be mounted, and none can be exchanged; with /srv/work/** only /srv/work
// itself. mounts.exchangeable turns this off, and with it everything that
// mounts promises against a malicious caller.
//
// # Limits
//
// The judge sees calls, not what exists: containers and volumes made while it
// was off keep what they have, and it does not tell one caller's containers
// from another's. Read-only mounts are as deep as the engine makes them:
// before Docker 25 file systems mounted below one stay writable. A build that
// is allowed can use the host's network. The judge has to run in dockerd's
// mount and network namespaces and as root, or it resolves other paths and
// reads other routes than dockerd. docs/security.md has the list.
//
// # When the plugin is down
//
// dockerd refuses every call while a configured authorization plugin does not
// answer, and does not start either. That is Docker's design, and the right way
// round. It tries each call again after 1, 2, 4 and 8 seconds (measured with
// 20.10: refused after 16 s, and the docker command makes two calls). A plugin
// that is back is found by the next attempt, of calls that wait and at once by
// new ones: nothing of dockerd needs a restart.
package authz
