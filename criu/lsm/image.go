package lsm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
)

// Magic numbers that begin an image file: a common one, which an inventory does
// not have, then its kind's.
const (
	commonMagic    = 0x54564319
	coreMagic      = 0x55053847
	inventoryMagic = 0x58313116

	maxImage = 16 << 20 // bytes of such a file; it takes some thousand
)

// change replaces the entries of an image file, if any changes.
func change(path string, magic uint32, to func([]byte) ([]byte, error)) error {
	data, err := read(path)
	if err != nil {
		return fmt.Errorf("image %s: %w", filepath.Base(path), err)
	}
	out, err := entries(data, magic, to)
	if err != nil {
		return fmt.Errorf("image %s: %w", filepath.Base(path), err)
	}
	if bytes.Equal(data, out) {
		return nil
	}
	if err := host.Replace(path, out); err != nil {
		return fmt.Errorf("image %s: %w", filepath.Base(path), err)
	}
	return nil
}

// errImage is of an image that makes no sense.
var errImage = fmt.Errorf("it makes no sense: %w", fault.ErrCorrupt)

func entries(data []byte, magic uint32, to func([]byte) ([]byte, error)) (out []byte, err error) {
	head := binary.LittleEndian.AppendUint32(nil, magic)
	if magic != inventoryMagic {
		head = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, commonMagic), magic)
	}
	rest, ok := bytes.CutPrefix(data, head)
	if !ok {
		return nil, errImage
	}
	for out = head; len(rest) > 0; {
		if len(rest) < 4 {
			return nil, errImage
		}
		n := int64(binary.LittleEndian.Uint32(rest))
		if n > int64(len(rest)-4) {
			return nil, errImage
		}
		entry, err := to(rest[4 : 4+n])
		if err != nil {
			return nil, err
		}
		out = append(binary.LittleEndian.AppendUint32(out, uint32(len(entry))), entry...)
		rest = rest[4+n:]
	}
	return out, nil
}

// field is one of a message: raw is all of it, value what follows its tag.
type field struct {
	num        protowire.Number
	typ        protowire.Type
	raw, value []byte
}

func each(message []byte, fn func(field) error) error {
	for len(message) > 0 {
		num, typ, tag := protowire.ConsumeTag(message)
		if tag < 0 {
			return errImage
		}
		n := protowire.ConsumeFieldValue(num, typ, message[tag:])
		if n < 0 {
			return errImage
		}
		if err := fn(field{num, typ, message[: tag+n : tag+n], message[tag : tag+n : tag+n]}); err != nil {
			return err
		}
		message = message[tag+n:]
	}
	return nil
}

// within changes the messages in a message that have a number: there may be more
// than one, which together are the field.
func within(message []byte, num protowire.Number, to func([]byte) ([]byte, error)) (out []byte, err error) {
	err = each(message, func(f field) error {
		if f.num != num {
			out = append(out, f.raw...)
			return nil
		}
		inner, n := protowire.ConsumeBytes(f.value)
		if f.typ != protowire.BytesType || n < 0 {
			return errImage
		}
		changed, err := to(inner)
		out = protowire.AppendBytes(protowire.AppendTag(out, num, protowire.BytesType), changed)
		return err
	})
	return out, err
}

func read(path string) (data []byte, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if data, err = io.ReadAll(io.LimitReader(f, maxImage+1)); err == nil && len(data) > maxImage {
		err = errImage
	}
	return data, err
}
