// Package overlay owns a sandbox's files: it mounts an overlay, and captures,
// applies, walks and compares the upperdir exactly.
//
// An upperdir is everything a sandbox changed over its image. "Exactly" means
// every entry that the kernel shows under it, the directory itself included:
// names of any bytes, types, permission bits, owners, modification times in
// full nanoseconds, link targets, hard link groups, device numbers, holes,
// content, and every extended attribute: whiteouts, opaque marks, ACLs and
// capabilities are attributes or devices like any other and get no rule of
// their own.
//
//	dir --scan--> Entry, Entry, ... --Capture--> PAX tar --Apply--> empty dir
//	                 |                                               |
//	                 +--TreeWriter--> JSON lines --Verify/Compare----+
//
// That carries a tree elsewhere. A checkpoint and a restore of one directory move only what
// differs. Collect lists the directory into a file cache (filecache.go), with which the next
// Collect reads only what has changed since. An Update makes a directory what a list says:
//
//	Collect -> PlanUpdate -> Stage (while the directory is in use) -> Apply (while it is not) -> Check
//
// One scan (scan.go) feeds Capture and Walk: a single goroutine lists
// directories in order, a few workers read inodes and small files ahead, and
// the consumer sees entries in one fixed order, that of ComparePaths. Memory
// depends on the longest directory, never on the size of a file. Apply reads
// the same order back and therefore never needs more of the tree in hand than
// the directories above the current entry; whatever it creates, it creates by
// one name inside a directory that it made and still holds open, so that no
// archive can reach out of the target.
//
// # What is not carried
//
// Access and change times, inode numbers and inode flags. An overlay keeps chattr's immutable and
// append-only flags in an extended attribute of the upper file, which is carried; an upper inode
// that really has one of these flags makes Capture and Walk fail, because it could not be
// restored. Space that is preallocated but was never written is a hole until it is read: the
// kernel then holds zeros for it in memory and reports data. What was captured is restored either
// way, and the restored file has one answer only.
//
// The kernel keeps marks of its own in an upperdir. It may remove one of them,
// trusted.overlay.impure, when a directory of the mount is merely listed. An upperdir is
// therefore proven against its tree before it is mounted again.
//
// # The archive
//
// It is a plain tar in PAX format, in the order of ComparePaths, that GNU tar
// and archive/tar read too. Extended attributes are SCHILY.xattr records, files
// with holes are in GNU's sparse format 1.0. Private records carry the rest:
//
//	AGENTBOX.type=socket   the entry is a socket; other readers see an empty file
//	AGENTBOX.xattr.N=V     an attribute whose name has a '=' or '%', which other
//	                       readers take for syntax; N is the name in unpadded base64url
package overlay
