package undo

import (
	"context"
	"errors"
	"slices"
	"testing"
)

func TestStack(t *testing.T) {
	cause, second := errors.New("cause"), errors.New("second")
	var did []int
	fill := func() *Stack {
		s := &Stack{}
		did = nil
		for i := range 3 {
			s.Add(func(ctx context.Context) error {
				did = append(did, i)
				if i == 1 {
					return second
				}
				return ctx.Err()
			})
		}
		return s
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()

	err := cause
	fill().Run(gone, &err)
	if !slices.Equal(did, []int{2, 1, 0}) || !errors.Is(err, cause) || !errors.Is(err, second) ||
		errors.Is(err, context.Canceled) {
		t.Errorf("%v: %v", did, err)
	}
	err = nil
	if fill().Run(gone, &err); len(did) > 0 || err != nil {
		t.Errorf("without an error: %v: %v", did, err)
	}
	err = cause
	s := fill()
	s.Release()
	if s.Run(gone, &err); len(did) > 0 || err != cause {
		t.Errorf("released: %v: %v", did, err)
	}
}
