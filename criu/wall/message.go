package wall

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/agentbox/agentbox/internal/fault"
)

// message is one decoded protobuf message. Two readers of one message must not
// understand two things, so what an encoder does not write is damage: numbers in more
// bytes than they take, groups, and, by way of take, fields that are there twice.
type message struct {
	image string
	name  string // of the message, for errors
	num   map[protowire.Number][]uint64
	raw   map[protowire.Number][][]byte
	order []protowire.Number // each once
}

const maxFields = 1 << 20 // in one message

func (m *message) damaged(format string, a ...any) error {
	return fmt.Errorf("image %s: %s %s: %w", m.image, m.name, fmt.Sprintf(format, a...), fault.ErrCorrupt)
}

func decode(image, name string, data []byte) (*message, error) {
	m := &message{image: image, name: name, num: map[protowire.Number][]uint64{}, raw: map[protowire.Number][][]byte{}}
	for fields := 0; len(data) > 0; fields++ {
		key, n := protowire.ConsumeVarint(data)
		if n < 0 || n != protowire.SizeVarint(key) || fields == maxFields {
			return nil, m.damaged("makes no sense")
		}
		num, typ := protowire.DecodeTag(key)
		if num < protowire.MinValidNumber {
			return nil, m.damaged("makes no sense")
		}
		data = data[n:]
		if !slices.Contains(m.order, num) {
			m.order = append(m.order, num)
		}
		switch typ {
		case protowire.VarintType:
			v, n := protowire.ConsumeVarint(data)
			if n < 0 || n != protowire.SizeVarint(v) {
				return nil, m.damaged("has a number (field %d) that makes no sense", num)
			}
			m.num[num], data = append(m.num[num], v), data[n:]
		case protowire.BytesType:
			v, n := protowire.ConsumeBytes(data)
			if n < 0 || n != protowire.SizeBytes(len(v)) {
				return nil, m.damaged("is cut off in field %d", num)
			}
			m.raw[num], data = append(m.raw[num], v), data[n:]
		case protowire.Fixed32Type, protowire.Fixed64Type:
			n := protowire.ConsumeFieldValue(num, typ, data)
			if n < 0 {
				return nil, m.damaged("is cut off in field %d", num)
			}
			m.raw[num], data = append(m.raw[num], data[:n]), data[n:]
		default:
			return nil, m.damaged("has a field %d of a kind that nothing writes", num)
		}
	}
	return m, nil
}

// only refuses fields with other numbers.
func (m *message) only(known ...protowire.Number) error {
	for _, num := range m.order {
		if !slices.Contains(known, num) {
			return refuse(m.image, m.name, "field %d is not known to this version of agentbox", num)
		}
	}
	return nil
}

// once proves that fields are there at most once, as numbers or as bytes.
func (m *message) once(nums, raws []protowire.Number) error {
	for _, n := range nums {
		if len(m.num[n]) > 1 || len(m.raw[n]) > 0 {
			return m.damaged("has field %d twice, or not as a number", n)
		}
	}
	for _, n := range raws {
		if len(m.raw[n]) > 1 || len(m.num[n]) > 0 {
			return m.damaged("has field %d twice, or not as bytes", n)
		}
	}
	return nil
}

// number returns a field that is a number, cut to 32 bits as CRIU's reader does; 0: there is none.
func (m *message) number(n protowire.Number) uint32 { return uint32(m.wide(n)) }

func (m *message) wide(n protowire.Number) uint64 {
	if v := m.num[n]; len(v) > 0 {
		return v[len(v)-1]
	}
	return 0
}

func (m *message) has(n protowire.Number) bool { return len(m.num[n])+len(m.raw[n]) > 0 }

func (m *message) text(n protowire.Number) string {
	if v := m.raw[n]; len(v) > 0 {
		return string(v[len(v)-1])
	}
	return ""
}

// numbers returns a repeated field of 32-bit numbers, packed or not.
func (m *message) numbers(n protowire.Number) (list []uint32, err error) {
	if len(m.num[n]) > 0 && len(m.raw[n]) > 0 {
		return nil, m.damaged("has field %d in two ways", n)
	}
	for _, v := range m.num[n] {
		list = append(list, uint32(v))
	}
	for _, packed := range m.raw[n] {
		for len(packed) > 0 {
			v, k := protowire.ConsumeVarint(packed)
			if k < 0 || k != protowire.SizeVarint(v) {
				return nil, m.damaged("has a number (field %d) that makes no sense", n)
			}
			list, packed = append(list, uint32(v)), packed[k:]
		}
	}
	return list, nil
}

// inner decodes a message in a message; nil: there is none.
func (m *message) inner(n protowire.Number, name string) (*message, error) {
	if err := m.once(nil, []protowire.Number{n}); err != nil {
		return nil, err
	}
	if len(m.raw[n]) == 0 {
		return nil, nil
	}
	return decode(m.image, name, m.raw[n][0])
}

// inners decodes a repeated one.
func (m *message) inners(n protowire.Number, name string) (list []*message, err error) {
	if len(m.num[n]) > 0 {
		return nil, m.damaged("has field %d not as bytes", n)
	}
	for _, data := range m.raw[n] {
		in, err := decode(m.image, name, data)
		if err != nil {
			return nil, err
		}
		list = append(list, in)
	}
	return list, nil
}

// changing returns a message, decoded before, in which the messages of a number are changed; by
// nil they, or its numbers, are left out.
func changing(data []byte, num protowire.Number, change func([]byte) []byte) (out []byte) {
	for len(data) > 0 {
		n, typ, tag := protowire.ConsumeTag(data)
		size := tag + protowire.ConsumeFieldValue(n, typ, data[tag:])
		switch {
		case n != num:
			out = append(out, data[:size]...)
		case change != nil:
			inner, _ := protowire.ConsumeBytes(data[tag:size])
			out = protowire.AppendBytes(protowire.AppendTag(out, num, protowire.BytesType), change(inner))
		}
		data = data[size:]
	}
	return out
}

// masking returns a message, decoded before, in which the numbers of a repeated field have
// the bits of most alone.
func masking(data []byte, num protowire.Number, most [2]uint32) (out []byte) {
	i := 0
	mask := func(v uint64) uint64 {
		if i++; i <= len(most) {
			return v & uint64(most[i-1])
		}
		return v
	}
	for len(data) > 0 {
		n, typ, tag := protowire.ConsumeTag(data)
		size := tag + protowire.ConsumeFieldValue(n, typ, data[tag:])
		switch {
		case n != num:
			out = append(out, data[:size]...)
		case typ == protowire.VarintType:
			v, _ := protowire.ConsumeVarint(data[tag:size])
			out = protowire.AppendVarint(protowire.AppendTag(out, num, typ), mask(v))
		default:
			packed, _ := protowire.ConsumeBytes(data[tag:size])
			var inner []byte
			for len(packed) > 0 {
				v, k := protowire.ConsumeVarint(packed)
				inner, packed = protowire.AppendVarint(inner, mask(v)), packed[k:]
			}
			out = protowire.AppendBytes(protowire.AppendTag(out, num, typ), inner)
		}
		data = data[size:]
	}
	return out
}

func fields(n ...protowire.Number) []protowire.Number { return n }
