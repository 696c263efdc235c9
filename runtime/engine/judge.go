package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// unrestorable returns why the processes of a ready checkpoint with undamaged images cannot
// be restored; empty: no reason is known.
func (up *upkeep) unrestorable(ctx context.Context, row store.Checkpoint) (why string, err error) {
	if row.Kind != runtime.KindFull {
		return "", nil
	}
	reader, err := up.store.OpenCheckpoint(ctx, row.ID)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil // removed meanwhile
	}
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	scratch, err := up.store.Scratch()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	dir := filepath.Join(scratch, "images")
	var names, ghosts []string
	images, err := reader.Images(ctx)
	if err != nil {
		return "", err
	}

	for _, im := range images {
		switch read, ghost := criu.Judges(im.Name); {
		case read:
			names = append(names, im.Name)
		case ghost:
			ghosts = append(ghosts, im.Name)
		}
	}
	if len(names) == 0 {
		return "it has no images of processes", nil
	}
	if err := reader.ExtractImages(ctx, dir, names...); err != nil {
		return "", err
	}
	for _, name := range ghosts {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			return "", err
		}
	}
	err = criu.Judge(dir)
	var u *criu.Unrestorable
	if errors.As(err, &u) {
		return u.Reason, nil
	}
	return "", err
}

// judgeAll judges the given checkpoints, or all, except damaged ones.
func (up *upkeep) judgeAll(ctx context.Context, ids []string, damaged []store.Damage) ([]runtime.Damaged, error) {
	rows, err := up.store.Checkpoints(ctx, store.Filter{})
	if err != nil {
		return nil, err
	}
	list := []runtime.Damaged{}
	for _, row := range rows {
		hurt := slices.ContainsFunc(damaged, func(d store.Damage) bool { return d.Checkpoint.ID == row.ID })
		if hurt || row.Status != store.Ready || len(ids) > 0 && !slices.Contains(ids, row.ID) {
			continue
		}
		why, err := up.unrestorable(ctx, row)
		if err != nil {
			return list, fmt.Errorf("checkpoint %s: %w", short(row.ID), err)
		}
		if why != "" {
			list = append(list, runtime.Damaged{Checkpoint: checkpointView(row), What: []string{why}})
		}
	}
	return list, nil
}
