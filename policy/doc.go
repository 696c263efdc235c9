// Package policy decides what a sandbox, and any caller acting on its behalf, may do.
//
// A Finder finds a policy, a YAML file, by its name or reads it from a file,
// and resolves it over its base to a Policy: Rules, each with its Origin. The
// Policy then judges a Request and says of each thing that is asked for which
// rule decided. The engine does so once, before a sandbox is made. What can be
// said is the table keys; it is what is read, printed, inherited and compared.
//
// It also owns the path jail: every operation that agentbox itself performs
// on the files of a sandbox (copying, reading, writing for a tool) goes
// through a Jail, which resolves names as the sandbox would see them and never
// leaves the sandbox's root, whatever symlinks and renames a process inside
// throws at it meanwhile. A name enters as a string, becomes a descriptor in
// one kernel call, and from then on only the descriptor is used.
//
// The package is a leaf: it knows directories and paths, never sandboxes.
package policy
