package idmap

import (
	"encoding/binary"
	"errors"
)

// Two extended attributes have ids in them. File capabilities, little-endian,
// name the root of the user namespace that they count in, unless that is the
// host's. Access control lists have the ids of named users and groups.
const (
	capsName     = "security.capability"
	capsRevision = 0xff000000
	capsOfHost   = 0x02000000 // 20 bytes
	capsOfRoot   = 0x03000000 // 24 bytes: the root's id is the last four

	accessName, defaultName = "system.posix_acl_access", "system.posix_acl_default"
	aclHeader, aclEntry     = 4, 8 // bytes; of an entry two are the tag, two the permissions, four the id
	aclUser, aclGroup       = 0x02, 0x08
)

// XattrOnHost is the value on the host of an attribute as it is in the tree.
func (m *Map) XattrOnHost(name, value string) (string, error) {
	data := []byte(value)
	switch {
	case m == nil:
	case name == capsName && len(data) == 20 && binary.LittleEndian.Uint32(data)&capsRevision == capsOfHost:
		binary.LittleEndian.PutUint32(data, binary.LittleEndian.Uint32(data)&^capsRevision|capsOfRoot)
		data = binary.LittleEndian.AppendUint32(data, m.Base)
	case name == accessName || name == defaultName:
		return eachID(data, m.Host)
	}
	return string(data), nil
}

// XattrInTree is the reverse of XattrOnHost.
func (m *Map) XattrInTree(name, value string) (string, error) {
	data := []byte(value)
	switch {
	case m == nil:
	case name == capsName && len(data) == 24 && binary.LittleEndian.Uint32(data)&capsRevision == capsOfRoot &&
		binary.LittleEndian.Uint32(data[20:]) == m.Base:
		data = data[:20]
		binary.LittleEndian.PutUint32(data, binary.LittleEndian.Uint32(data)&^capsRevision|capsOfHost)
	case name == accessName || name == defaultName:
		return eachID(data, func(id int) (int, error) { return m.Tree(id), nil })
	}
	return string(data), nil
}

// eachID replaces the ids in an access control list. A value that is no list stays, and the
// kernel refuses it.
func eachID(acl []byte, to func(int) (int, error)) (string, error) {
	var errs []error
	for at := aclHeader; at+aclEntry <= len(acl); at += aclEntry {
		if tag := binary.LittleEndian.Uint16(acl[at:]); tag != aclUser && tag != aclGroup {
			continue
		}
		id, err := to(int(binary.LittleEndian.Uint32(acl[at+4:])))
		errs = append(errs, err)
		binary.LittleEndian.PutUint32(acl[at+4:], uint32(id))
	}
	return string(acl), errors.Join(errs...)
}
